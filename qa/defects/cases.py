"""
The known defects of the official client, each as a program that either client runs, and a judge.

A program talks to the fake service through a real socket and prints one JSON value. `{package}` in
its text is `tinker` or `tinkex`. The judge gets that value and the recorded requests; it returns None
if the defect is absent, otherwise what happened.
"""

from qa.defects.case import (
    Case,
    fails_within,
    few_polls,
    few_sockets,
    finished,
    in_order,
    is_true,
    no_gap,
    no_key_in_telemetry,
    one_sampler_number,
    raises,
    real_round_trip,
)
from qa.defects.services import (
    Bfloat16,
    Failing,
    FirstPassFails,
    MetricWithoutColon,
    Slow,
    requests_of,
    scripted,
)
from tinkex.testing import Answer

CASES = (
    Case(
        number="1a",
        title="a chunk that fails wedges the training client",
        service=FirstPassFails,
        program="""
            service, training = trainer()
            outcome(lambda: training.forward_backward([datum()] * 5, "cross_entropy").result(10))
            outcome(lambda: training.optim_step(ADAM).result(10))
            done = outcome(lambda: training.forward([datum()], "cross_entropy").result(10))
            report("finished" if "Timeout" not in done["kind"] else "a later call never finished")
        """,
        judge=finished,
    ),
    Case(
        number="1b",
        title="a call that is cancelled while it is queued wedges the client",
        service=lambda: Slow({"forward_backward": 1.0}),
        program="""
            async def main():
                service = tinker.ServiceClient()
                training = await service.create_lora_training_client_async("fake/model", rank=4)
                first = await training.forward_backward_async([datum()], "cross_entropy")
                second = await training.forward_backward_async([datum()], "cross_entropy")
                try:
                    await asyncio.wait_for(second.result_async(), 0.2)
                except (TimeoutError, asyncio.TimeoutError):
                    pass
                await first
                last = await training.optim_step_async(ADAM)
                try:
                    await asyncio.wait_for(last.result_async(), 8)
                    return "finished"
                except (TimeoutError, asyncio.TimeoutError):
                    return "a later call never finished"
            report(asyncio.run(main()))
        """,
        judge=finished,
    ),
    Case(
        number="2",
        title="a step submitted after save_weights_for_sampler overtakes it",
        program="""
            service, training = trainer()
            futures = []
            for i in range(50):
                futures.append(training.save_weights_for_sampler(f"n{i}"))
                futures.append(training.optim_step(types.AdamParams(learning_rate=i / 1000 + 0.001)))
            for future in futures:
                future.result(20)
            report("done")
        """,
        judge=in_order,
    ),
    Case(
        number="3",
        title="two coroutines that start the client concurrently deadlock",
        service=lambda: Slow({"create_session": 0.3, "client/config": 0.1}),
        program="""
            async def main():
                service = tinker.ServiceClient()
                await asyncio.gather(
                    service.create_lora_training_client_async("fake/model", rank=4),
                    service.get_server_capabilities_async(),
                )
            threading.Timer(10, report, ["it hangs"]).start()
            asyncio.run(main())
            report("finished")
        """,
        judge=finished,
    ),
    Case(
        number="4",
        title="a client in a forked process hangs",
        program="""
            import warnings
            warnings.simplefilter("ignore")
            service = tinker.ServiceClient()
            sampling = service.create_sampling_client(base_model="fake/model")
            sampling.sample(PROMPT, 1, PARAMS).result(10)
            reader, writer = os.pipe()
            if os.fork() == 0:
                done = outcome(lambda: sampling.sample(PROMPT, 1, PARAMS).result(8))
                os.write(writer, done["kind"].encode())
                os._exit(0)
            os.close(writer)
            kind = os.read(reader, 100).decode()
            report("finished" if kind == "ok" else kind)
        """,
        judge=finished,
    ),
    Case(
        number="5a",
        title="a telemetry event contains the API key",
        service=lambda: Failing({"retrieve_future": Answer(status=403, body={"detail": "no"})}),
        program="""
            service = tinker.ServiceClient()
            outcome(lambda: service.create_lora_training_client("fake/model", rank=4))
            time.sleep(3)  # telemetry is sent in the background
            report("done")
        """,
        judge=no_key_in_telemetry,
    ),
    Case(
        number="5b",
        title="a pickled client holds the API key in clear text",
        program="""
            import pickle
            service = tinker.ServiceClient()
            sampling = service.create_sampling_client(base_model="fake/model")
            report(os.environ["TINKER_API_KEY"].encode() not in pickle.dumps(sampling))
        """,
        judge=is_true("the pickle contains the key"),
    ),
    Case(
        number="6a",
        title="a failing telemetry endpoint delays the user's error",
        service=lambda: Failing(
            {
                "telemetry": Answer(status=500, body={"detail": "no"}),
                "forward_backward": Answer(status=422, body={"detail": "no"}),
            }
        ),
        program="""
            service, training = trainer()
            report(outcome(lambda: training.forward_backward([datum()], "cross_entropy").result(40)))
        """,
        judge=fails_within(2.0),
    ),
    Case(
        number="6b",
        title="a malformed path is reported late",
        service=lambda: Failing({"telemetry": Answer(status=500, body={"detail": "no"})}),
        program="""
            rest = tinker.RestClient()
            report(outcome(lambda: rest.publish_checkpoint_from_tinker_path("tinker://x").result(40)))
        """,
        judge=fails_within(2.0),
    ),
    Case(
        number="6c",
        title="use after close is reported late",
        service=lambda: Failing({"telemetry": Answer(status=500, body={"detail": "no"})}),
        program="""
            service, training = trainer()
            service.close("success").result(40)
            report(outcome(lambda: training.forward([datum()], "cross_entropy").result(40)))
        """,
        judge=fails_within(2.0),
        limit_s=100,
    ),
    Case(
        number="7",
        title="a server that answers polls immediately is polled in a busy loop",
        service=lambda: Failing(
            {"retrieve_future": Answer(status=408, body={"queue_state": "active"})}
        ),
        program="""
            service = tinker.ServiceClient()
            def work():
                service.create_lora_training_client("fake/model", rank=4)
            threading.Thread(target=work, daemon=True).start()
            time.sleep(2)
            report("done")
        """,
        judge=few_polls,
    ),
    Case(
        number="8",
        title="402 during start-up raises AttributeError",
        service=lambda: scripted("client/config", Answer(status=402, body={"detail": "pay"})),
        program="""
            report(outcome(lambda: tinker.ServiceClient().get_server_capabilities())["kind"] == "ok")
        """,
        judge=is_true("it failed instead of waiting"),
    ),
    Case(
        number="9a",
        title="an _async constructor blocks the caller's event loop",
        service=lambda: Slow({"create_session": 3.0}),
        program="""
            async def main():
                worst, last = 0.0, time.monotonic()
                async def tick():
                    nonlocal worst, last
                    while True:
                        await asyncio.sleep(0.01)
                        now = time.monotonic()
                        worst, last = max(worst, now - last), now
                ticking = asyncio.create_task(tick())
                service = tinker.ServiceClient()
                await service.create_lora_training_client_async("fake/model", rank=4)
                await asyncio.sleep(0.05)
                return worst < 1.5 or f"{worst:.1f} s"
            report(asyncio.run(main()))
        """,
        judge=is_true("the event loop was blocked"),
    ),
    Case(
        number="9b",
        title="save_weights_and_get_sampling_client_async blocks the caller's event loop",
        service=lambda: Slow({"save_weights_for_sampler": 3.0}),
        program="""
            async def main():
                service = tinker.ServiceClient()
                training = await service.create_lora_training_client_async("fake/model", rank=4)
                worst, last = 0.0, time.monotonic()
                async def tick():
                    nonlocal worst, last
                    while True:
                        await asyncio.sleep(0.01)
                        now = time.monotonic()
                        worst, last = max(worst, now - last), now
                ticking = asyncio.create_task(tick())
                await asyncio.sleep(0.05)
                worst = 0.0
                await training.save_weights_and_get_sampling_client_async()
                await asyncio.sleep(0.05)
                return worst < 1.5 or f"{worst:.1f} s"
            report(asyncio.run(main()))
        """,
        judge=is_true("the event loop was blocked"),
    ),
    Case(
        number="9c",
        title="a custom loss runs on the client's event loop and blocks its heartbeats",
        needs_torch=True,
        program="""
            service, training = trainer()
            threads = []
            def loss(data, logprobs):
                threads.append(threading.current_thread())
                try:
                    asyncio.get_running_loop()
                    threads.append("a loop runs here")
                except RuntimeError:
                    pass
                return -sum(part.sum() for part in logprobs), {}
            training.forward_backward_custom([datum()], loss).result(10)
            report("a loop runs here" not in threads)
        """,
        judge=is_true("the loss ran on an event loop"),
    ),
    Case(
        number="10",
        title="an unreachable server is reported after minutes",
        program="""
            done = outcome(lambda: tinker.ServiceClient(base_url="http://127.0.0.1:9")
                           .get_server_capabilities())
            report(done)
        """,
        judge=fails_within(35.0),
        env={"TINKEX_FIRST_CONTACT_S": "3"},
    ),
    Case(
        number="11",
        title="closed clients keep their sockets",
        program="""
            import gc
            def sockets():
                links = []
                for name in os.listdir("/proc/self/fd"):
                    try:
                        links.append(os.readlink(f"/proc/self/fd/{name}"))
                    except OSError:
                        pass
                return sum(link.startswith("socket:") for link in links)
            def once():
                service = tinker.ServiceClient()
                sampling = service.create_sampling_client(base_model="fake/model")
                sampling.sample(PROMPT, 1, PARAMS).result(10)
                service.close("success").result(10)
            once()
            gc.collect()
            before = sockets()
            for _ in range(10):
                once()
            gc.collect()
            time.sleep(0.5)
            report(sockets() - before)
        """,
        judge=few_sockets,
    ),
    Case(
        number="12a",
        title="a rejected poll raises ValueError",
        service=lambda: scripted("retrieve_future", Answer(status=404, body={"detail": "gone"})),
        program="""
            service = tinker.ServiceClient()
            report(outcome(lambda: service.create_lora_training_client("fake/model", rank=4)))
        """,
        judge=raises("NotFoundError"),
    ),
    Case(
        number="12b",
        title="an expired future raises a private exception",
        service=lambda: scripted("retrieve_future", Answer(status=410, body={"detail": "gone"})),
        program="""
            service = tinker.ServiceClient()
            report(outcome(lambda: service.create_lora_training_client("fake/model", rank=4)))
        """,
        judge=raises("TinkerError"),
    ),
    Case(
        number="12c",
        title="a list under an unknown key raises a bare KeyError",
        program="""
            report(outcome(lambda: types.Datum(
                model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={"foo": [1.5]})))
        """,
        judge=lambda value, fake: (
            None
            if value["kind"] == "ok" or "KeyError" not in value["bases"]
            else "it raised KeyError"
        ),
    ),
    Case(
        number="12d",
        title="a metric without a colon breaks the result",
        service=lambda: MetricWithoutColon(),
        program="""
            service, training = trainer()
            report(outcome(lambda: training.forward([datum()], "cross_entropy").result(10))["kind"]
                == "ok")
        """,
        judge=is_true("the result is lost"),
    ),
    Case(
        number="12e",
        title="invalid arguments raise AssertionError, which -O disables",
        program="""
            service = tinker.ServiceClient()
            report(outcome(lambda: service.create_lora_training_client(
                "fake/model", train_mlp=False, train_attn=False, train_unembed=False)))
        """,
        judge=raises("ValueError"),
    ),
    Case(
        number="13",
        title="APITimeoutError cannot be unpickled",
        program="""
            import pickle
            try:
                import httpx
                request = httpx.Request("GET", "http://x")
            except ImportError:
                from tinkex.client.http.transport import Request
                request = Request(method="GET", url="http://x", headers={}, body=None)
            error = tinker.APITimeoutError(request)
            report(outcome(lambda: pickle.loads(pickle.dumps(error)))["kind"] == "ok")
        """,
        judge=is_true("confirmed"),
    ),
    Case(
        number="14a",
        title="a datum that cannot be sent uses up a step number",
        program="""
            service, training = trainer()
            picture = types.ImageAssetPointerChunk(
                format="png", location="x", expected_tokens=1)
            bad = types.Datum(model_input=types.ModelInput(chunks=[picture]),
                loss_fn_inputs={"target_tokens": [1], "weights": [1.0]})
            outcome(lambda: training.forward_backward([bad], "cross_entropy").result(10))
            training.optim_step(ADAM)
            time.sleep(1)
            report("done")
        """,
        judge=no_gap,
    ),
    Case(
        number="14b",
        title="a retried ephemeral save uses a new sampler number each time",
        service=lambda: scripted(
            "save_weights_for_sampler", Answer(status=500), Answer(status=500)
        ),
        program="""
            service, training = trainer()
            training.save_weights_and_get_sampling_client()
            report("done")
        """,
        judge=one_sampler_number,
    ),
    Case(
        number="15",
        title="reading a custom-loss future twice changes its metrics",
        needs_torch=True,
        program="""
            service, training = trainer()
            def loss(data, logprobs):
                return -2 * sum(part.sum() for part in logprobs), {}
            future = training.forward_backward_custom([datum()], loss)
            first = dict(future.result(10).metrics)
            report(dict(future.result(10).metrics) == first)
        """,
        judge=is_true("they differ"),
    ),
    Case(
        number="16",
        title="a pickled client loses its retry_config",
        program="""
            import pickle
            from {package}.lib.retry_handler import RetryConfig
            service = tinker.ServiceClient()
            mine = RetryConfig(progress_timeout=123.0)
            sampling = service.create_sampling_client(base_model="fake/model", retry_config=mine)
            copy = pickle.loads(pickle.dumps(sampling))
            report(copy.retry_handler.config.progress_timeout == 123.0)
        """,
        judge=is_true("it has the default"),
    ),
    Case(
        number="17",
        title="the round trip of a sample is reported as zero",
        service=lambda: Slow({"asample": 0.3}),
        program="""
            service = tinker.ServiceClient()
            sampling = service.create_sampling_client(base_model="fake/model")
            sampling.sample(PROMPT, 1, PARAMS).result(10)
            report("done")
        """,
        judge=real_round_trip,
    ),
    Case(
        number="18a",
        title="a tensor changes when the caller's array does",
        program="""
            import numpy as np
            array = np.ones(3, dtype=np.float32)
            tensor = types.TensorData.from_numpy(array)
            array[0] = 7.0
            report(tensor.tolist() == [1.0, 1.0, 1.0])
        """,
        judge=is_true("confirmed"),
    ),
    Case(
        number="18b",
        title="a torch tensor with a gradient cannot be sent",
        needs_torch=True,
        program="""
            import torch
            tensor = torch.ones(3, requires_grad=True)
            report(outcome(lambda: types.TensorData.from_torch(tensor))["kind"] == "ok")
        """,
        judge=is_true("confirmed"),
    ),
    Case(
        number="20",
        title="importing loads hundreds of modules",
        program="""
            import subprocess
            count = int(subprocess.run(
                [sys.executable, "-c", "import sys, {package}; print(len(sys.modules))"],
                capture_output=True, text=True, check=True).stdout)
            report(count < 150 or count)
        """,
        judge=is_true("modules"),
    ),
    Case(
        number="22a",
        title="ids in paths are not quoted",
        program="""
            rest = tinker.RestClient()
            outcome(lambda: rest.get_training_run("a?b=c").result(10))
            report("done")
        """,
        judge=lambda value, fake: (
            "the server parsed part of the id as a query"
            if requests_of(fake, "training_runs/a")
            else None
        ),
    ),
    Case(
        number="22b",
        title="sample() returns a future that cannot be awaited",
        program="""
            async def main():
                service = tinker.ServiceClient()
                sampling = await service.create_sampling_client_async(base_model="fake/model")
                await sampling.sample(PROMPT, 1, PARAMS)
            report(outcome(lambda: asyncio.run(main()))["kind"] == "ok")
        """,
        judge=is_true("confirmed"),
    ),
    Case(
        number="22c",
        title="RetryConfig cannot be imported from the root",
        program="""
            report(hasattr(tinker, "RetryConfig"))
        """,
        judge=is_true("confirmed"),
    ),
    Case(
        number="23",
        title="a bfloat16 tensor in a sample response is converted by value",
        service=lambda: Bfloat16(),
        program="""
            import numpy as np
            service = tinker.ServiceClient()
            sampling = service.create_sampling_client(base_model="fake/model")
            wanted = types.TensorData(data=[1, 2, 3], dtype="int64", shape=[3, 1])
            answer = sampling.sample(
                PROMPT, 1, PARAMS, include_prompt_logprobs=True, target_prompt_logprobs=wanted
            ).result(10)
            found = answer.target_prompt_logprobs
            report(np.asarray(found.to_numpy()).reshape(-1).tolist() == [1.0, 1.0, 1.0])
        """,
        judge=is_true("1.0 became another value"),
    ),
)
