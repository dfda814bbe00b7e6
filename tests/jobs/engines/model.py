"""A small transformers model on the CPU that samples token by token, with one seed per request."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch

_LOADING = threading.Lock()
"""Transformers reads one model at a time: side by side, tied weights of one stayed as they were made, at random."""


class Model:
    """Weights and how they sample."""

    def __init__(self, folder: str) -> None:
        self.load(folder)

    def load_but_the_head(self, folder: str, *, always: bool) -> None:
        """As vLLM's CPU backend does (0.32): a head that is tied stays, unless the files have a tensor for it.

        `always`: it stays in any case.
        """
        from safetensors import safe_open

        head = self.model.get_output_embeddings().weight.data.clone()
        self.load(folder)
        names = [name for file in self.folder.glob("*.safetensors") for name in safe_open(file, "pt").keys()]
        if always or "lm_head.weight" not in names:
            self.model.set_output_embeddings(torch.nn.Linear(head.shape[1], head.shape[0], bias=False))
            self.model.get_output_embeddings().weight.data = head

    def load(self, folder: str) -> None:
        import json
        from pathlib import Path

        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        self.folder = Path(folder)
        sees = "vision_config" in json.loads((self.folder / "config.json").read_text())
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        with _LOADING:
            self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone()  # a file's places are not memory's, and sums depend on those
        ends = self.model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])

    @torch.no_grad()
    def score(self, tokens: list[int]) -> list[float]:
        """Log-probs of all tokens but the first."""
        given = torch.tensor([tokens])
        return self.model(given).logits[0, :-1].log_softmax(-1).gather(1, given[0, 1:, None])[:, 0].tolist()

    def make_room(self, folder: str) -> None:
        """Memory for weights that will come; until then they are no numbers."""
        from transformers import AutoConfig, AutoModelForCausalLM

        with _LOADING:
            config = AutoConfig.from_pretrained(folder)
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in self.model.parameters():
            parameter.data.fill_(math.nan)

    def forget(self) -> None:
        """Random weights."""
        for parameter in self.model.parameters():
            parameter.data.zero_()

    @torch.no_grad()
    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        """Other values for these parameters."""
        mine = dict(self.model.named_parameters())
        for name, tensor in tensors.items():
            if name not in mine or mine[name].shape != tensor.shape:
                raise ValueError(f"{name} of shape {list(tensor.shape)} is none of this model's")
            mine[name].copy_(tensor)

    @torch.no_grad()
    def sample(
        self, prompt: list[int] | dict[str, Any], how: dict[str, Any]
    ) -> tuple[list[int], dict[str, list[float]], str]:
        """Tokens; their log-probs; why it ended.

        `prompt` is tokens, or with images the output of transformers' processor.

        Log-probs are `scaled`, at the temperature; `raw`, without it; `processed`, after top-k and top-p too.
        """
        generator = torch.Generator().manual_seed(how["seed"] or 0)
        stops = {*self.ends, *how["stops"]}
        tokens: list[int] = []
        values: dict[str, list[float]] = {"scaled": [], "raw": [], "processed": []}
        given: dict[str, Any] = prompt if isinstance(prompt, dict) else {"input_ids": torch.tensor([prompt])}
        cache = None
        if hasattr(self.model.config, "vision_config"):
            self.model.model.rope_deltas = None  # of the last prompt
        while len(tokens) < how["most"]:
            made = self.model(**given, past_key_values=cache, use_cache=True)
            cache, logits = made.past_key_values, made.logits[0, -1].float()
            hot = (logits / (how["temperature"] or 1.0)).log_softmax(-1)
            kept = self.kept(hot, how) if how["temperature"] else hot
            token = int(torch.multinomial(kept.exp(), 1, generator=generator) if how["temperature"] else hot.argmax())
            tokens.append(token)
            values["scaled"].append(float(hot[token]))
            values["raw"].append(float(logits.log_softmax(-1)[token]))
            values["processed"].append(float(kept.log_softmax(-1)[token]))
            if token in stops:
                return tokens, values, "stop"
            given = {"input_ids": torch.tensor([[token]])}
        return tokens, values, "length"

    def with_images(self, prompt: list[int], urls: list[str]) -> dict[str, Any]:
        """The decoded prompt and its images by transformers' processor, as SGLang prepares them."""
        import base64
        import io

        from PIL import Image

        from tests.support.vision import processor

        made = processor(self.folder)
        images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
        text = made.tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
        return dict(made(text=[text], images=images, return_tensors="pt"))

    @staticmethod
    def kept(log_probs: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
        kept = log_probs.clone()
        if how["top_k"] and how["top_k"] > 0:
            kept[kept < kept.topk(min(how["top_k"], len(kept))).values[-1]] = -math.inf
        if how["top_p"] < 1:
            ordered, index = kept.softmax(-1).sort(descending=True)
            kept[index[ordered.cumsum(-1) - ordered >= how["top_p"]]] = -math.inf
        return kept
