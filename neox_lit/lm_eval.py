"""An adapter for EleutherAI's lm-evaluation-harness (`lm_eval`): its tasks on our models, sharded over ranks or not.

The harness runs on every rank with all requests; ranks share the forwards out among themselves (see `sharing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from neox_lit.errors import NeoXError
from neox_lit.generate import Sampling
from neox_lit.module import NeoXLightning
from neox_lit.scoring import Row, score
from neox_lit.sharing import dealt, merged

_MAX_GEN_TOKENS = 256  # of a task that does not say


class NeoXLM(TemplateLM):
    """What `lm_eval.simple_evaluate(model=...)` takes.

    Args:
        module: With its tokenizer.
        batch_size: Requests in one forward.

    Raises:
        NeoXError: No tokenizer is known.
    """

    def __init__(self, module: NeoXLightning, batch_size: int = 8) -> None:
        super().__init__()
        if module.tokenizer is None:
            raise NeoXError("no tokenizer is known; set module.tokenizer = TextTokenizer.from_file(path)")
        self.module, self.batch_size = module, batch_size
        self._tokenizer = module.tokenizer

    @property
    def max_length(self) -> int:
        return self.module.config.max_seq_len

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.end_of_text

    @property
    def tokenizer_name(self) -> str:
        return f"neox_lit-{self._tokenizer.hash}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return list(self._tokenizer.encode(string))  # GPT-NeoX's tokenizer adds none

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        rows = [Row(context, targets) for _, context, targets in requests]
        found = [tuple(one) for one in score(self.module, rows, self.batch_size, self.module.device)]
        for (texts, _, _), one in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, one)
        return found  # type: ignore[return-value]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        windows = [
            [
                utils.make_disjoint_window(window)
                for window in utils.get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for (text,) in (request.args for request in requests)
        ]
        found = iter(self._loglikelihood_tokens([(None, *window) for of_text in windows for window in of_text]))
        sums = [sum(next(found)[0] for _ in of_text) for of_text in windows]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        texts: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        end = self._tokenizer.decode([self.eot_token_id])
        for group in groups.values():
            options: dict[str, Any] = dict(normalize_gen_kwargs(requests[group[0]].args[1], _MAX_GEN_TOKENS))
            stop = handle_stop_sequences(options.pop("until", None), eos=end or None)
            n_new = options.pop("max_gen_toks")
            if n_new >= self.max_length:
                raise NeoXError(
                    f"a task wants {n_new} tokens (max_gen_toks), the model's max_seq_len={self.max_length} has no room"
                )
            sampled = options.get("do_sample", False)
            sampling = Sampling(
                temperature=float(options.get("temperature", 1.0)) if sampled else 0.0,
                top_k=int(options.get("top_k", 0)) if sampled else 0,
                top_p=float(options.get("top_p", 1.0)) if sampled else 1.0,
            )
            for some in dealt([group[i : i + self.batch_size] for i in range(0, len(group), self.batch_size)]):
                prompts = [requests[i].args[0] for i in some]
                ids = [self.tok_encode(text)[n_new - self.max_length :] or [self.eot_token_id] for text in prompts]
                stops = [text for text in stop if text]
                found = self.module.complete_ids(ids, n_new, sampling, stop=stops, shared=True)
                texts.update(zip(some, found, strict=True))
        texts = merged(texts)
        for i, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, texts[i])
        return [texts[i] for i in range(len(requests))]
