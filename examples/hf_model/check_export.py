"""Load an exported model in transformers, sample from it, and compare its tensors with the initial model.

    python examples/hf_model/check_export.py runs/hf_model/model data/hf_model/tiny-qwen3

Exits 1 if the model does not respond with digits, or its tensors have other names or shapes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.hf_model.reward import share_of_digits  # noqa: E402


def main() -> None:
    exported, origin = sys.argv[1:3]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    before = AutoModelForCausalLM.from_pretrained(origin).state_dict()
    after = model.state_dict()
    same = before.keys() == after.keys() and all(before[name].shape == after[name].shape for name in before)
    moved = max(float((after[name].float() - before[name].float()).abs().max()) for name in before) if same else 0.0
    chat = [{"role": "user", "content": "digits 7?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.manual_seed(0)
    answers = model.generate(**prompt, do_sample=True, top_k=0, num_return_sequences=16, max_new_tokens=16)
    texts = tokenizer.batch_decode(answers[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    share = sum(map(share_of_digits, texts)) / len(texts)
    print(f"{exported}: {len(after)} tensors, as in {origin}: {same}; the largest change of a weight: {moved:.4f}")
    print(f"transformers samples {texts[0]!r}, {texts[1]!r}, ...: {share:.0%} digits")
    sys.exit(0 if same and moved > 0 and share > 0.8 else 1)


if __name__ == "__main__":
    main()
