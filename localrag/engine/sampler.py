"""llama.cpp's samplers, one chain for each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from localrag.decoding import SamplingParams
from localrag.engine.grammar import grammar_of
from localrag.engine.library import library
from localrag.errors import EngineError

if TYPE_CHECKING:
    from localrag.engine.constrained import ConstrainedSampler
    from localrag.engine.llama import LlamaModel


class LlamaSampler:
    """A chain of llama.cpp's samplers for one sequence. Temperature 0 takes the likeliest token."""

    def __init__(self, params: SamplingParams, model: LlamaModel) -> None:
        grammar = None if params.json_schema is None else grammar_of(params.json_schema, or_text=params.or_text)
        self.lib = lib = library()
        self.handle = self._chain()
        self._penalties: Any = None
        self._constrained: ConstrainedSampler | None = None
        penalties = params.repeat_penalty, params.frequency_penalty, params.presence_penalty
        if penalties != (1.0, 0.0, 0.0) and params.repeat_last_n > 0:
            self._penalties = self.handle if grammar is None else self._chain()  # under a grammar it comes before, on all tokens
            self._add(
                self._penalties,
                lib.llama_sampler_init_penalties(model.num_vocab_tokens, params.repeat_last_n, *penalties),
            )
        if params.temperature == 0.0:
            self._add(self.handle, lib.llama_sampler_init_greedy())
        else:
            # top-k comes first: the others are 2 to 40 times slower on a whole vocabulary
            if params.top_k > 0:
                self._add(self.handle, lib.llama_sampler_init_top_k(params.top_k))
            self._add(self.handle, lib.llama_sampler_init_top_p(params.top_p, 1))
            self._add(self.handle, lib.llama_sampler_init_min_p(params.min_p, 1))
            self._add(self.handle, lib.llama_sampler_init_temp(params.temperature))
            # the greatest number of 32 bits would have llama.cpp draw a seed of its own
            self._add(self.handle, lib.llama_sampler_init_dist(params.seed % lib.LLAMA_DEFAULT_SEED))
        if grammar is not None:
            from localrag.engine.constrained import ConstrainedSampler  # noqa: PLC0415  # weight: numpy

            self._constrained = ConstrainedSampler(
                lib,
                model.vocab,
                num_vocab_tokens=model.num_vocab_tokens,
                grammar=grammar,
                choose=None if params.temperature == 0.0 else self.handle,
                penalties=self._penalties,
            )

    def _chain(self) -> Any:  # noqa: ANN401  # a C pointer
        params = self.lib.llama_sampler_chain_default_params()
        params.no_perf = True
        return self.lib.llama_sampler_chain_init(params)

    def _add(self, chain: Any, link: Any) -> None:  # noqa: ANN401  # C pointers
        if not link:
            raise EngineError("llama.cpp refused a sampler.")
        self.lib.llama_sampler_chain_add(chain, link)

    def sample(self, context: Any, index: int) -> int:  # noqa: ANN401  # a C pointer
        """The next token from entry `index` of the last batch, whose logits must be there (LlamaContext sees to it)."""
        if self._constrained is not None:
            return self._constrained.sample(self.lib.llama_get_logits_ith(context, index))
        return int(self.lib.llama_sampler_sample(self.handle, context, index))

    def close(self) -> None:
        if self.handle:
            if self._constrained is not None:
                self._constrained.close()
                if self._penalties:
                    self.lib.llama_sampler_free(self._penalties)
            self.lib.llama_sampler_free(self.handle)
            self.handle = None
