"""The other side of `jspark bench cpu`: transformers' generate with torch, in an interpreter of its own.

Run as a script by any Python that has torch, transformers, accelerate and gguf; it imports nothing of jspark.
Requests come as JSON lines on stdin, answers go out as JSON lines on stdout:

{"load": FOLDER, "gguf_file": NAME or null}             → {"load_seconds": …, "versions": {…}}
{"prompt": [ids], "new_tokens": N, "threads": N}        → {"tokens": [ids], "seconds": [one a token]}

Greedy, float32, never stopping early. `seconds`: the first entry is the prefill, the others one step each. Any
failure is answered with {"error": …}; the end of stdin ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Clock:
    """A streamer for generate that notes when each token comes; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Called by generate with the prompt and then with every token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called by generate at the end."""


class Reference:
    """The loaded model."""

    def __init__(self, folder: str, gguf_file: str | None):
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]

        started = time.perf_counter()
        extra = {} if gguf_file is None else {"gguf_file": gguf_file}
        model = transformers.AutoModelForCausalLM.from_pretrained(Path(folder), **extra)
        self.model = model.float().eval()
        self.load_seconds = time.perf_counter() - started
        # Nothing ends an answer early, and no processor is added to forbid it.
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        self.versions = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def generate(self, prompt: list[int], new_tokens: int, threads: int) -> dict[str, Any]:
        """Greedy tokens and the seconds each took."""
        import torch  # pyright: ignore[reportMissingImports]

        torch.set_num_threads(threads)
        ids, clock = torch.tensor([prompt]), Clock()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                streamer=clock,
            )
        seconds = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
        return {"tokens": out[0, len(prompt) :].tolist(), "seconds": seconds}


def main() -> None:
    """Answers requests until stdin ends."""
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    reference = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "load" in request:
                reference = Reference(request["load"], request["gguf_file"])
                answer = {"load_seconds": reference.load_seconds, "versions": reference.versions}
            else:
                assert reference is not None, "load comes first"
                answer = reference.generate(request["prompt"], request["new_tokens"], request["threads"])
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
