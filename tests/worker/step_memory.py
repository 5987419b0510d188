"""Peak memory of real training steps of a scratch student, in bytes over what the process held before the model was made.

    python -m tests.worker.step_memory STUDENT.json SEQUENCES LENGTH MASKED

Forward through TRL's loss head, backward, AdamW, as SFTTrainer and GRPOTrainer do them, in a process where nothing else takes memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from trl.trainer.utils import add_fused_lm_head

from parallel_r1 import student
from parallel_r1.config import ScratchStudent


def held() -> int:
    """Bytes of this process in memory now."""
    return _status("VmRSS")


def peak() -> int:
    """The most it ever held since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Let the peak start from what is held now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, sequences: int, length: int, masked: bool) -> None:
    """One optimiser step over random tokens."""
    ids = torch.randint(0, model.config.vocab_size, (sequences, length))
    mask = {"attention_mask": torch.ones(sequences, 1, length, length, dtype=torch.bool).tril()} if masked else {}
    model(input_ids=ids, labels=ids, fused_lm_head=True, **mask).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main() -> None:
    """Print the bytes."""
    config = ScratchStudent.model_validate_json(sys.argv[1])
    sequences, length, masked = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
    torch.set_num_threads(1)
    tokenizer = student.train_tokenizer(["Tom has 12 apples."], config.vocab_size)
    smallest = {"hidden_size": 32, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 32, "intermediate_size": 32}
    tiny = config.model_copy(update=smallest)
    for size in (tiny, config):  # the tiny one first, so that libraries are loaded when counting begins
        before = held()
        forget_peak()
        model = student.scratch_model(size, tokenizer, seed=0)
        model.config._attn_implementation = "sdpa"
        model.resize_token_embeddings(config.vocab_size, mean_resizing=False)
        add_fused_lm_head(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):  # the second step has the optimiser's state
            step(model, optimizer, sequences, length, masked)
    print(peak() - before)


if __name__ == "__main__":
    main()
