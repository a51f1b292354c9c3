"""The tokenizer that a GGUF file describes, built with the `tokenizers` package."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from export_examples.smollm2.errors import ModelFileError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
END_OF_TEXT = ("<|im_end|>", "<|endoftext|>")


class TextTokenizer:
    """Text to token ids and back.

    Control tokens written out in a text (`<|im_start|>`) are recognised; decoding leaves them out.
    `stop_ids` are the tokens that end a generation.
    """

    def __init__(self, metadata: dict[str, Any]) -> None:
        """Build from the metadata below `tokenizer.` of a GGUF file."""
        if metadata.get("ggml.model") != "gpt2":
            raise ModelFileError(
                f"Only byte-level BPE ('gpt2') tokenizers are served, this file has "
                f"{metadata.get('ggml.model')!r}."
            )
        tokens: list[str] = metadata["ggml.tokens"]
        kinds: list[int] = metadata.get("ggml.token_type", [NORMAL] * len(tokens))
        vocab = {token: index for index, token in enumerate(tokens)}
        merges = [tuple(merge.split(" ")) for merge in metadata["ggml.merges"]]
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        backend.pre_tokenizer = build_pre_tokenizer(metadata.get("ggml.pre", "gpt-2"))
        backend.decoder = decoders.ByteLevel()
        for special, kind in ((True, CONTROL), (False, USER_DEFINED)):
            added = [token for token, k in zip(tokens, kinds, strict=True) if k == kind]
            named = [AddedToken(token, special=special, normalized=False) for token in added]
            (backend.add_special_tokens if special else backend.add_tokens)(named)
        self.backend = backend
        self.chat_template: str | None = metadata.get("chat_template")
        self.bos_id: int | None = metadata.get("ggml.bos_token_id")
        self.adds_bos = bool(metadata.get("ggml.add_bos_token", False))
        ends = [metadata.get("ggml.eos_token_id"), metadata.get("ggml.eot_token_id")]
        ends += [vocab.get(token) for token in END_OF_TEXT]
        self.stop_ids = sorted({end for end in ends if end is not None})

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, after the opening token if the file asks for one."""
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if self.adds_bos and self.bos_id is not None else ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids` without control tokens."""
        return self.backend.decode(ids, skip_special_tokens=True)

    def chat(self, message: str) -> str:
        """Return `message` as the user's turn of the file's chat template, up to the answer."""
        if self.chat_template is None:
            raise ModelFileError("This file has no chat template; leave out --chat.")
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # a requirement of torch

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(self.chat_template).render(
            messages=[{"role": "user", "content": message}], add_generation_prompt=True
        )


def build_pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Return the splitting rule that `tokenizer.ggml.pre` names."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    if name in ("gpt-2", "default"):
        return byte_level
    raise ModelFileError(f"The pre-tokenizer {name!r} is not served; 'smollm' and 'gpt-2' are.")


class TextStream:
    """Decode one request's tokens as they come, holding back incomplete UTF-8 characters."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.stream = DecodeStream(skip_special_tokens=True)
        self.ids: list[int] = []
        self.sent = 0

    def push(self, token: int) -> str:
        """Return the text that `token` completes, often none of it or more than its own."""
        self.ids.append(token)
        text = self.stream.step(self.tokenizer.backend, token) or ""
        self.sent += len(text)
        return text

    def finish(self) -> str:
        """Return what is still held back."""
        return self.tokenizer.decode(self.ids)[self.sent :]
