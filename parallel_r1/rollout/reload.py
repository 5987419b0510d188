"""New weights for a running vLLM server: its worker's extension (`--worker-extension-cls`), called over `/collective_rpc`."""

from __future__ import annotations

from typing import Any

from parallel_r1.rollout import vllm_structured

EXTENSION = f"{__name__}.Reload"


def repack_tied_head(model: Any) -> None:
    """A tied lm_head keeps a packed copy on the CPU, which a reload of the embedding leaves stale: pack it again."""
    if getattr(model.config, "tie_word_embeddings", False):
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


class Reload:
    """Mixed into vLLM's worker; `model_runner` and `device` are the worker's."""

    model_runner: Any
    device: Any

    def load_checkpoint(self, folder: str) -> dict[str, str]:
        """Take the weights of a checkpoint folder of the same architecture; says on what device and with which attention the model runs."""
        self.reload_weights(weights_path=folder)  # type: ignore[attr-defined]
        model = self.model_runner.get_model()
        if self.device.type == "cpu":
            repack_tied_head(model)
        return {"device": self.device.type, "attention": "structured" if type(model).__name__ == vllm_structured.ARCHITECTURE else "causal"}
