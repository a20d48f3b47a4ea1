"""A model folder as one GGUF file, for llama.cpp and what is built on it.

Families whose tensors are only renamed (and, for Llama, whose rows of queries and keys change
places) are written here. llama.cpp's own converter knows all others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rather.data.template import load_tokenizer
from rather.errors import ConfigError
from rather.files import read_json
from rather.model.files import ModelFiles, weight_files

FAMILIES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
OTHERS = (
    "llama.cpp's convert_hf_to_gguf.py can convert the folder that `rather export` writes without "
    "--format"
)
FILE_TYPES = {
    torch.float32: "ALL_F32",
    torch.float16: "MOSTLY_F16",
    torch.bfloat16: "MOSTLY_BF16",
}
# The regular expressions by which tokenizers split text, under llama.cpp's names.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
BLANKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    CONTRACTIONS + r"\p{N}{1,3}" + BLANKS: "llama-bpe",
    CONTRACTIONS + r"\p{N}" + BLANKS: "qwen2",
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of a token


class Vocabulary(NamedTuple):
    """The tokens of a tokenizer by their ids."""

    model: str  # llama.cpp's name of the algorithm
    texts: list[str]
    types: list[int]
    scores: list[float]  # if tokens are merged by score
    merges: list[str]  # if they are merged in this order
    splits: str = ""  # llama.cpp's name of the rule that splits text
    space_first: bool = False


def write_gguf(folder: Path, out: Path, name: str) -> None:
    """Write a model folder as the file `out`; `name` is the model's in its metadata."""
    import gguf

    config: dict[str, Any] = read_json(folder / "config.json")
    family = config["model_type"]
    if family not in FAMILIES:
        raise ConfigError(
            f"--format gguf: model family '{family}' is not one of {', '.join(FAMILIES)}; {OTHERS}."
        )
    _refuse_scaled_positions(config)
    files = ModelFiles(weight_files(folder))
    arch = getattr(gguf.MODEL_ARCH, FAMILIES[family])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    renamed = {}
    for tensor in files:
        if tensor == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        gguf_name = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise ConfigError(f"--format gguf: {tensor!r} has no name in a GGUF file; {OTHERS}.")
        renamed[tensor] = gguf_name
    vocabulary, tokenizer = read_vocabulary(folder, config["vocab_size"])
    temporary = out.with_name(f".tmp-{out.name}")
    writer = gguf.GGUFWriter(temporary, gguf.MODEL_ARCH_NAMES[arch])
    try:
        _add_sizes(writer, config, name)
        dtype = files.dtype("model.embed_tokens.weight")
        writer.add_file_type(int(getattr(gguf.LlamaFileType, FILE_TYPES[dtype])))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_vocabulary(writer, vocabulary, tokenizer)
        # All sizes come first in the file, then one tensor at a time.
        for tensor, to in renamed.items():
            array, kind = _array(gguf, files[tensor])
            writer.add_tensor_info(to, array.shape, array.dtype, array.nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in renamed:
            writer.write_tensor_data(_array(gguf, _in_order(tensor, files[tensor], config))[0])
        writer.close()
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _refuse_scaled_positions(config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ConfigError(f"--format gguf: positions are scaled ({kind}); {OTHERS}.")


def _add_sizes(writer: Any, config: dict[str, Any], name: str) -> None:
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10_000)))
    writer.add_vocab_size(config["vocab_size"])


def _in_order(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Return rows of queries and keys as llama.cpp rotates them: neighbours instead of halves."""
    heads = config["num_attention_heads"]
    counts = {"q_proj": heads, "k_proj": config.get("num_key_value_heads") or heads}
    layer = name.split(".")[-2]
    if config["model_type"] != "llama" or layer not in counts:
        return tensor
    by_head = tensor.reshape(counts[layer], 2, -1, *tensor.shape[1:])
    return by_head.transpose(1, 2).reshape(tensor.shape)


def _array(gguf: Any, tensor: Tensor) -> tuple[np.ndarray[Any, Any], Any]:
    """Return (the numbers, their kind if numpy has no name for it); vectors are float32."""
    if tensor.ndim == 1:
        tensor = tensor.float()
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint8).numpy(), gguf.GGMLQuantizationType.BF16
    return tensor.numpy(), None


# --- the tokenizer ---


def read_vocabulary(folder: Path, size: int) -> tuple[Vocabulary, Any]:
    """Return the tokens of a folder, filled up to `size`, and the tokenizer."""
    tokenizer = load_tokenizer(str(folder))
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise ConfigError(f"--format gguf: a tokenizer of the kind {model['type']}; {OTHERS}.")
    ids = tokenizer.get_vocab()
    texts = [f"[PAD{number}]" for number in range(max(size, 1 + max(ids.values())))]
    types = [UNUSED] * len(texts)
    for text, number in ids.items():
        texts[number], types[number] = text, NORMAL
    for token in content["added_tokens"]:
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    pairs = [m if isinstance(m, list) else m.split(" ") for m in model["merges"]]
    merges = [" ".join(pair) for pair in pairs]
    if not model.get("byte_fallback"):
        splits = _splits(content)
        return Vocabulary("gpt2", texts, types, [], merges, splits), tokenizer
    for number, text in enumerate(texts):
        if types[number] == NORMAL and text.startswith("<0x"):
            types[number] = BYTE
    if model.get("unk_token") in ids:
        types[ids[model["unk_token"]]] = UNKNOWN
    scores = [0.0] * len(texts)
    merged = {"".join(pair): -float(rank) for rank, pair in reversed([*enumerate(pairs)])}
    for number, text in enumerate(texts):
        if types[number] == NORMAL:
            scores[number] = merged.get(text, -float(len(pairs) + number))
    space_first = "Prepend" in json.dumps(content.get("normalizer"))
    space_first |= '"prepend_scheme": "first"' in json.dumps(content.get("pre_tokenizer"))
    return Vocabulary("llama", texts, types, scores, [], "default", space_first), tokenizer


def _splits(content: dict[str, Any]) -> str:
    """Return llama.cpp's name of the rule by which a byte-level tokenizer splits text."""
    steps = list(_steps(content.get("pre_tokenizer")))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        pattern = steps[0]["pattern"].get("Regex", "")
        if pattern in SPLITS:
            return SPLITS[pattern]
    raise ConfigError(
        f"--format gguf: the tokenizer splits text by a rule without a name; {OTHERS}."
    )


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if step and step["type"] == "Sequence":
        for inner in step["pretokenizers"]:
            yield from _steps(inner)
    elif step:
        yield step


def _add_vocabulary(writer: Any, vocabulary: Vocabulary, tokenizer: Any) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.splits)
    writer.add_token_list(vocabulary.texts)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.space_first)
    else:
        writer.add_token_merges(vocabulary.merges)
    for kind in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{kind}_token_id")
        if number is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    begins = tokenizer("x")["input_ids"][:1]
    writer.add_add_bos_token(begins == [tokenizer.bos_token_id])
    writer.add_add_eos_token(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
