"""The banner of a server, as text."""

from pathlib import Path

from tinkex.server.announcement import Facts, LoadedModel, banner, ready_line

URL = "http://127.0.0.1:8000"
SMALL = LoadedModel(
    name="HuggingFaceTB/SmolLM2-135M-Instruct",
    context=8192,
    device="cpu",
    dtype="float32",
    memory_used_bytes=1_040_000_000,
    memory_bytes=11_700_000_000,
    device_bytes=23_400_000_000,
)


def test_the_banner_names_everything_in_80_columns() -> None:
    facts = Facts(models=[SMALL])
    text = banner(URL, Path("/home/me/.local/share/tinkex"), facts, home=Path("/home/me"))
    assert text == (
        "tinkex ready at http://127.0.0.1:8000\n"
        "\n"
        "  model   HuggingFaceTB/SmolLM2-135M-Instruct\n"
        "          cpu, float32, context of 8,192 tokens\n"
        "          memory: 1.0 GB used now, up to 11.7 GB of 23.4 GB\n"
        "  data    ~/.local/share/tinkex\n"
        "  keys    off: every program on this machine has access\n"
        "  status  http://127.0.0.1:8000/\n"
        "\n"
        "  To use it from another terminal, with tinkex or the official SDK:\n"
        "    export TINKER_BASE_URL=http://127.0.0.1:8000\n"
        "    export TINKER_API_KEY=tml-local\n"
        "\n"
        "  Press Ctrl-C to stop. Unfinished work continues at the next start.\n"
    )
    assert max(map(len, text.splitlines())) <= 80


def test_models_that_are_not_loaded_yet_say_so() -> None:
    facts = Facts(models=[LoadedModel(name="a/b", context=512), LoadedModel(name="c/d")])
    text = banner(URL, Path("/data"), facts)
    assert "  model   a/b\n          context of 512 tokens, loads when it is first used\n" in text
    assert "  model   c/d\n          loads when it is first used\n" in text
    assert "  data    /data\n" in text


def test_with_keys_the_banner_asks_for_one() -> None:
    text = banner(URL, Path("/data"), Facts(models=[SMALL], needs_keys=True))
    assert "keys    on: clients need a key; `tinkex key create` makes one" in text
    assert "export TINKER_API_KEY=tml-...   # your key" in text


def test_facts_survive_the_way_to_the_supervisor() -> None:
    facts = Facts(models=[SMALL], needs_keys=True)
    assert Facts.from_json(facts.to_json()) == facts


def test_a_shell_can_read_the_url_of_an_ipv6_address() -> None:
    text = banner("http://[::1]:8000", Path("/data"), Facts())
    assert "export TINKER_BASE_URL='http://[::1]:8000'\n" in text
    assert ready_line("http://[::1]:8000") == text.splitlines()[0]
