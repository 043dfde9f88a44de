"""Prints observable behavior of a client: `differences_program.py tinker|tinkex URL OTHER_URL`."""

import importlib
import json
import logging
import os
import sys
import warnings

import numpy as np
import pydantic

warnings.simplefilter("ignore")
client = importlib.import_module(sys.argv[1])
url, elsewhere = sys.argv[2:]
types = client.types
facts = {}


def result_of(work):
    """The result, or the class of the error."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 (its class is the result)
        return type(error).__name__


def tensor(values):
    return types.TensorData(data=values, dtype="int64")


def inputs(**values):
    return types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=values)


array = np.array([1, 2])
kept = types.TensorData.from_numpy(array)
array[0] = 7
facts["tensor after its array changed"] = kept.to_numpy().tolist()
prompt, copy = types.ModelInput.from_ints([1, 2]), types.ModelInput.from_ints([1, 2])
facts["chunks after append_int"] = len(prompt.append_int(3).chunks)
facts["equal prompts"] = prompt == copy
facts["equal tensors"] = tensor([1]) == tensor([1])
facts["equal examples"] = inputs(weights=[1.0]) == inputs(weights=[1.0])
facts["prompts have a hash"] = result_of(lambda: hash(prompt) == hash(copy))
facts["prompt is a pydantic model"] = isinstance(prompt, pydantic.BaseModel)
facts["chunk is a pydantic model"] = isinstance(prompt.chunks[0], pydantic.BaseModel)
facts["schema of a chunk"] = sorted(types.EncodedTextChunk.model_json_schema()["properties"])
facts["half a token"] = result_of(lambda: inputs(target_tokens=[1.5]).loss_fn_inputs and "taken")
facts["token of 2**31"] = result_of(lambda: types.ModelInput.from_ints([2**31]).to_ints())
facts["token as text"] = result_of(lambda: types.ModelInput.from_ints(["1"]).to_ints())
facts["list under another name"] = result_of(
    lambda: inputs(mask=[1, 0]).loss_fn_inputs["mask"].dtype
)
facts["bools as weights"] = inputs(weights=[True, False]).loss_fn_inputs["weights"].tolist()
facts["bools as tokens"] = result_of(
    lambda: inputs(target_tokens=[True, False]).loss_fn_inputs["target_tokens"].tolist()
)
for name in ("TINKER_API_KEY", "TINKER_BASE_URL"):
    os.environ.pop(name, None)
facts["client without a key"] = result_of(lambda: client.ServiceClient() and "made")

service = client.ServiceClient(base_url=url, api_key="tml-secret")
facts["first call"] = result_of(lambda: len(service.get_server_capabilities().supported_models))
facts["redirect to the same origin"] = result_of(
    lambda: len(service.get_server_capabilities().supported_models)
)
rest = client.RestClient(base_url=url, api_key="tml-secret")
try:
    rest.get_training_run("gone").result()
except client.NotFoundError as error:
    response = error.response
    facts["header of an error"] = response.headers.get("Retry-After")
    facts["url of an error"] = str(response.url).startswith(url)
    facts["a 404 is no success"] = (response.status_code, response.is_success, response.is_error)
    facts["raise_for_status raises"] = result_of(response.raise_for_status) is not None
    facts["time of an error"] = response.elapsed.total_seconds() > 0
    facts["message of an error"] = error.message
    facts["first line of an error"] = str(error).partition("\n")[0]
    facts["request of an error holds the key"] = "tml-secret" in str(error.request.headers)
facts["logger"] = sys.argv[1] in logging.root.manager.loggerDict
facts["redirect to another origin"] = result_of(
    lambda: len(service.get_server_capabilities().supported_models)
)
print(json.dumps(facts), flush=True)
os._exit(0)
