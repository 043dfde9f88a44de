"""Defect 5: credentials are sent only in their header, and appear nowhere else."""

import json
import logging
import pickle
import traceback

import pytest

import tinkex
from client.test_token_exchange import given, jwt
from tinkex import SamplingParams, types
from tinkex.testing import Answer, FakeService

KEY = "tml-secret-0123456789"
LENT = "tml-lent-9876543210"
GATEWAY = "gateway-secret-13579"
TOKEN = jwt("secret-subject")
SECRETS = (KEY, LENT, GATEWAY, TOKEN)

PROMPT = types.ModelInput.from_ints([1, 2, 3])


def rendered(error: BaseException) -> str:
    """All text of an exception, in every way it is usually printed or stored."""
    chain, said = [error], []
    while chain[-1].__cause__ or chain[-1].__context__:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    for each in chain:
        said += [str(each), repr(each), repr(vars(each)), "".join(traceback.format_exception(each))]
        for part in ("request", "response"):
            held = getattr(each, part, None)
            said += [repr(held), repr(getattr(held, "headers", None))]
            said.append(repr(getattr(held, "content", None) or getattr(held, "body", None)))
        if isinstance(each, tinkex.TinkerError):
            said.append(repr(pickle.dumps(each)))
    return "\n".join(said)


class Mirror(FakeService):
    """Refuses the given endpoints, and quotes the request, as some gateways do."""

    refuses = ""

    async def answer(self, method, endpoint, headers, body):
        answer = await super().answer(method, endpoint, headers, body)
        if endpoint != self.refuses:
            return answer
        return 403, {"x-odd": "1"}, json.dumps({"detail": dict(headers)}).encode()


@pytest.fixture(params=[False, True], ids=["key", "token"])
def mirror(request):
    fake = Mirror(config={"pjwt_auth_enabled": request.param})
    fake.script("auth/token", *[given(TOKEN)] * 3)
    return fake


def test_defect_5_no_secret_is_in_errors_logs_reprs_pickles_or_telemetry(mirror, caplog, capfd):
    said = []
    with caplog.at_level(logging.DEBUG):
        service = mirror.client(
            api_key=KEY, default_headers_overrides={"CF-Access-Client-Secret": GATEWAY}
        )
        training = service.create_lora_training_client("fake/model")
        sampling = service.create_sampling_client(base_model="fake/model")
        path = training.save_state("x").result(5).path

        def step():
            return training.optim_step(types.AdamParams()).result(5)

        def sample():
            return sampling.sample(PROMPT, 1, SamplingParams(max_tokens=1)).result(5)

        def restore():
            return service.create_training_client_from_state(path, weights_access_token=LENT)

        for mirror.refuses, act in (
            ("get_server_capabilities", service.get_server_capabilities),
            ("retrieve_future", step),
            ("asample", sample),
            ("weights_info", restore),
            ("optim_step", step),
        ):
            with pytest.raises(tinkex.PermissionDeniedError, match="X-Stainless-OS") as caught:
                act()
            said.append(rendered(caught.value))
        mirror.refuses = ""
        restore()
        connected = service.holder._connected.value
        objects = [service, training, sampling, service.holder, service.holder.settings]
        objects += [connected, connected.calls, connected.credential, connected.transport]
        said += [repr(each) for each in objects] + [str(each) for each in objects]
        said.append(repr(pickle.dumps(sampling)))
        service.close("errored", "because").result(5)
    said += [record.getMessage() for record in caplog.records]
    said += [repr(vars(record)) for record in caplog.records]
    said += capfd.readouterr()
    reports = [seen for seen in mirror.requests if seen.endpoint == "telemetry"]
    assert reports
    said += [repr(seen.body) for seen in reports]
    text = "\n".join(said)
    assert [secret for secret in SECRETS if secret in text] == []
    # Make sure that there were secrets to leak, and that something was logged:
    assert KEY in {seen.headers["x-api-key"] for seen in mirror.requests}
    assert any(LENT in repr((seen.headers, seen.body)) for seen in mirror.requests)
    assert any("X-API-Key" in record.getMessage() for record in caplog.records)


def test_a_token_service_that_answers_something_else_is_not_quoted():
    fake = FakeService(config={"pjwt_auth_enabled": True})
    fake.script("auth/token", Answer(status=200, body={"token": TOKEN}))
    service = fake.client()
    with pytest.raises(tinkex.TinkerError, match="no field `jwt`") as caught:
        service.get_server_capabilities()
    assert TOKEN not in rendered(caught.value)
    service.close("errored").result(5)


def test_types_that_contain_a_secret_do_not_print_it():
    load = types.LoadWeightsRequest(
        path="tinker://a/weights/b", optimizer=False, weights_access_token=LENT
    )
    assert LENT not in repr(load) + str(load)
    assert LENT in load.model_dump_json()
    assert TOKEN not in repr(types.AuthTokenResponse(jwt=TOKEN))
    assert LENT not in repr(types.CopyWeightsRequest(source_path="p", weights_access_token=LENT))
