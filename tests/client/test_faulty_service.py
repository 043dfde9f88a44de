"""A service that fails constantly in every way gives the same results as one that does not."""

import random

from tinkex import RetryConfig, types
from tinkex.testing import Answer, FakeService, Lost

ADAM = types.AdamParams(learning_rate=1e-2)
QUICK = {"retry-after-ms": "1"}


class Faulty(FakeService):
    """About every third request gets a fault, chosen by a seed."""

    def __init__(self, seed: int, **settings) -> None:
        super().__init__(**settings)
        self._dice = random.Random(seed)

    async def answer(self, method, endpoint, headers, body):
        if endpoint in ("forward_backward", "optim_step", "asample", "retrieve_future"):
            roll = self._dice.random()
            if roll < 0.3 and not self._scripts[endpoint]:
                statuses = (408, 409, 429, 500, 502, 503)
                self.script(
                    endpoint,
                    Answer(status=self._dice.choice(statuses), headers=QUICK)
                    if roll < 0.27
                    else Lost(after=roll < 0.285),
                )
        return await super().answer(method, endpoint, headers, body)


def run(fake, datum):
    with fake.client() as service:
        training = service.create_lora_training_client("fake/model", rank=4)
        sampling = service.create_sampling_client(
            base_model="fake/model", retry_config=RetryConfig(retry_delay_base=0.001)
        )
        passes, samples = [], []
        for step in range(40):
            passes.append(training.forward_backward([datum] * 5, "cross_entropy"))
            passes.append(training.optim_step(ADAM))
            prompt = types.ModelInput.from_ints([step, step + 1])
            samples += [
                sampling.sample(prompt, 1, types.SamplingParams(max_tokens=3)) for _ in range(5)
            ]
        results = [future.result(50) for future in passes]
        tokens = [future.result(50).sequences[0].tokens for future in samples]
    return [getattr(result, "metrics", None) for result in results], tokens, fake.ran


def test_training_and_sampling_give_the_same_results_and_nothing_runs_twice(datum):
    config = {"fwdbwd_max_chunk_len": 2}
    calm = run(FakeService(config=config), datum)
    faulty = run(Faulty(7, config=config), datum)
    assert faulty == calm
    numbers = [number for _, number, _ in faulty[2]]
    assert numbers == list(range(1, 161))  # 40 steps of three chunks and an optimizer step
