"""LoRA: low-rank adapters are trained in place of the weights, and merged into them at the end of a stage.

So every later stage, and vLLM, see one kind of checkpoint. The rows of the six tags are trained themselves, in the input and in the output
table: the adapters of the linear layers don't reach them, and rows that stay as they were added hardly learn (method.md 4).
"""

from __future__ import annotations

from collections.abc import Iterator

from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from parallel_r1.config import LoraConfig
from parallel_r1.markup import TAGS
from parallel_r1.sharding import whole

ADAPTER = "default"
"""peft's name for the adapter that TRL trains."""


def peft_config(config: LoraConfig | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PeftLoraConfig | None:
    """What TRL's trainers take as `peft_config`; None trains all weights. Tied tables get one adapter for both, as peft ties them."""
    if config is None:
        return None
    tags = [tokenizer.convert_tokens_to_ids(tag) for tag in TAGS]
    tables = {id(table) for table in (model.get_input_embeddings(), model.get_output_embeddings())}
    return PeftLoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules),
        trainable_token_indices={name: tags for name, module in model.named_modules() if id(module) in tables},
        task_type="CAUSAL_LM",
    )


def show_bias(model: nn.Module) -> None:
    """Let TRL's trainer see the bias of the output table, mostly None: its fused head asks for it, and peft 0.21 wraps it away."""
    head = model.get_output_embeddings()
    if isinstance(head, TrainableTokensWrapper):
        head.__dict__["bias"] = head.original_module.bias


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights as the stage's checkpoint would have them, by name, tied ones once: adapters merged in, `model` left as it is. Where
    processes hold a part of it each, they have to ask together (parallel_r1/sharding.py)."""
    yield from _weights(below(model), "", set())


def _weights(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(module, LoraLayer):
        base = module.get_base_layer()
        yield f"{prefix}weight", whole(base.weight.detach() + module.get_delta_weight(ADAPTER).detach())
        if base.bias is not None:
            yield f"{prefix}bias", whole(base.bias)
    elif isinstance(module, TrainableTokensWrapper):
        if module.token_adapter.tied_adapter is None:
            yield f"{prefix}weight", whole(module.weight)
    else:
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) not in seen:
                seen.add(id(weight))
                yield f"{prefix}{name}", whole(weight)
        for name, child in module.named_children():
            yield from _weights(child, f"{prefix}{name}.", seen)


def below(model: nn.Module) -> nn.Module:
    """The model that adapters were put on; itself where there are none."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
