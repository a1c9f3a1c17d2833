"""A vLLM server that writes the texts: token ids go in and come out, and nothing is tokenised anew.

It speaks OpenAI's completions protocol with vLLM's additions (`stop_token_ids`, `ignore_eos`, `return_token_ids`), so
vLLM itself may live in another environment, or on another machine.
"""

import json
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from transformers import PreTrainedModel

from selfdraft.texts import Text

TIMEOUT = 3600.0  # seconds for one answer, waiting for its turn included
CHECKED = 32  # greedy tokens of the server that are compared with the model
NEARLY = 1.0  # by how much their logits may be behind the model's largest: what rounding in bfloat16 can do


@dataclass(frozen=True)
class Server:
    """Where a model is served, under which name, by which version of vLLM, and how long a text may become there."""

    url: str
    model: str
    version: str
    longest: int

    def write(
        self,
        texts: Sequence[Text],
        end_ids: Collection[int],
        requests: int,
        show: Callable[[list[Text], int], None] = lambda batch, count: None,
    ) -> None:
        """Has the server finish all texts, `requests` at once; `show` is given each one, and how long it became.

        The same as `texts.write`: the temperature alone shapes the distribution, whatever the server's defaults are,
        and nothing but `end_ids` ends a text.
        """
        pool = ThreadPoolExecutor(requests)
        try:
            asked = {pool.submit(self.finish, text, end_ids): text for text in texts}
            for done in as_completed(asked):
                done.result()
                show([asked[done]], len(asked[done].new))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def finish(self, text: Text, end_ids: Collection[int]) -> None:
        """One answer; `text` is given its tokens."""
        body: dict[str, Any] = {"model": self.model, "prompt": text.prompt, "max_tokens": text.limit, "seed": text.seed}
        body |= {"temperature": text.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "return_token_ids": True}
        body |= {"stop_token_ids": sorted(end_ids), "ignore_eos": True, "skip_special_tokens": False}
        choice = ask(f"{self.url}/completions", body)["choices"][0]
        tokens = choice.get("token_ids")
        if tokens is None:
            raise ValueError(f"the server at {self.url} returns no token ids; vLLM does since 0.10.2")
        text.add(tokens, end_ids)
        if text.finish is None and choice["finish_reason"] != "length":  # there it had no room for more
            raise ValueError(
                f"the server at {self.url} ended an answer after {len(tokens)} of {text.limit} tokens, no end token "
                f"(finish_reason {choice['finish_reason']!r})"
            )
        text.finish = text.finish or "length"

    @torch.no_grad()
    def check(self, model: PreTrainedModel, prompt: list[int]) -> None:
        """ValueError unless what the server says greedily is, but for rounding, what `model` would say.

        Tells another model or another checkpoint of it, not one whose weights differ by little more than rounding.
        """
        said = Text(prompt, 0, 0.0, CHECKED)
        self.write([said], (), requests=1)
        same = max(said.new) < model.config.get_text_config().vocab_size
        if same:
            ids = torch.tensor([prompt + said.new], device=model.device)
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
            behind = logits.amax(-1) - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
            same = bool(behind.max() <= NEARLY)
        if not same:
            raise ValueError(
                f"the server at {self.url} serves '{self.model}', which does not say what {model.config._name_or_path} "
                "says; start it with the same model, or give that one as --model"
            )


def connect(url: str) -> Server:
    """The server at `url`, which ends in /v1. ValueError when none answers there."""
    url = url.rstrip("/")
    served = ask(f"{url}/models")["data"][0]
    version = ask(f"{url.removesuffix('/v1')}/version")["version"]
    return Server(url, served["id"], version, served["max_model_len"])


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=TIMEOUT) as answer:
            return json.load(answer)
    except HTTPError as error:
        said = error.read().decode(errors="replace")
        raise ValueError(f"the server refuses {url} (status {error.code}): {said[:500]}") from None
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"no vLLM server answers at {url} ({error}); start one with `pip install vllm` and `vllm serve MODEL`, or "
            "say by --server where it is"
        ) from None
