"""The Content-Digest header."""

from tinkex.wire.content_digest import content_digest, is_intact

# RFC 9530, appendix D: the digest of this representation.
BODY = b'{"hello": "world"}\n'
DIGEST = "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:"


def test_the_header_has_the_form_of_rfc_9530():
    assert content_digest(BODY) == DIGEST


def test_another_body_has_another_digest():
    assert is_intact(BODY, DIGEST)
    assert not is_intact(BODY[:-1], DIGEST)


def test_absent_and_unknown_digests_are_ignored():
    assert is_intact(BODY, None)
    assert is_intact(BODY, "sha-512=:AAAA:")
    assert is_intact(BODY, f"{DIGEST}, sha-512=:AAAA:")
