"""Builds the playground: a folder that any file server serves, and that asks no other host for anything.

    python docs/playground/build.py build site/playground     the page, the library, Python as WebAssembly (npm)
    python docs/playground/build.py traces                    the steps of models in traces/, made again; needs torch

`build` needs npm, and Python alone.
"""

import argparse
import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ("index.html", "style.css", "app.js", "worker.js")

PYODIDE = "pyodide@314.0.7"
INTEGRITY = "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")
RUNTIME += ("package.json",)  # its version and licence

BLOCKED = ("torch", "optree", "einops", "numpy")
NEEDED = f"""
import json, sys
sys.modules |= dict.fromkeys({BLOCKED!r})
import playground
print(json.dumps([module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "yafsdp_fn"]))
"""


def build(out: Path) -> None:
    """Makes the folder `out`, which must not hold anything else."""
    if out.exists():
        if not (out / "worker.js").is_file() and any(out.iterdir()):
            raise SystemExit(f"{out}: there is something else; give a new folder")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    for name in PAGE:
        shutil.copy(HERE / name, out / name)
    shutil.copytree(HERE / "traces", out / "traces")
    library(out / "library.zip")
    runtime(out / "pyodide")


def library(path: Path) -> None:
    """Zips what the page needs of the library: all that importing playground.py imports, where there is no torch."""
    code = [sys.executable, "-c", NEEDED]
    ran = subprocess.run(code, env={"PYTHONPATH": f"{ROOT}:{HERE}"}, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"the library does not import without torch:\n{ran.stderr}")
    files = list(map(Path, json.loads(ran.stdout)))
    files += [stub for file in files if (stub := file.with_suffix(".pyi")).is_file()]  # where packages list their names
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(HERE / "playground.py", "playground.py")
        for file in files:
            archive.write(file, file.relative_to(ROOT))


def runtime(folder: Path) -> None:
    """Puts Python as WebAssembly into `folder`, of the version and the bytes that are named above."""
    if (npm := shutil.which("npm")) is None:
        raise SystemExit("npm is not there: it fetches Python as WebAssembly")
    with tempfile.TemporaryDirectory() as scratch:
        asked = [npm, "pack", PYODIDE, "--json", "--prefer-offline", "--pack-destination", scratch]
        ran = subprocess.run(asked, capture_output=True, text=True)
        if ran.returncode:
            raise SystemExit(f"npm pack {PYODIDE} failed:\n{ran.stderr}")
        (packed,) = Path(scratch).glob("*.tgz")
        found = "sha512-" + base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode()
        if found != INTEGRITY:
            raise SystemExit(f"{PYODIDE} is {found}, expected {INTEGRITY}")
        folder.mkdir()
        with tarfile.open(packed) as archive:
            for name in RUNTIME:
                member = archive.extractfile(f"package/{name}")
                assert member is not None
                (folder / name).write_bytes(member.read())


def traces() -> None:
    """Traces the steps of a few models: one microbatch of a row a rank, in bf16, with AdamW and clipping."""
    import dataclasses

    import torch

    import yafsdp_fn as ya
    from models import llama

    precision = ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16)
    tx = ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(3e-4))
    four = dataclasses.replace(llama.CONFIGS["llama3.2-1b"], layers=4)
    each = [("llama3.2-1b", four, 4096, 8), *((name, llama.CONFIGS[name], seq, gpus) for name, seq, gpus in SHIPPED)]
    listed = []
    for name, config, tokens, gpus in each:
        row = torch.empty(1, tokens, dtype=torch.long, device="meta")
        batch = {"tokens": row, "targets": row}
        found = ya.planner.trace(
            llama.loss(config), llama.params(config), batch, ranks=gpus, precision=precision, tx=tx
        )
        cut = config is four
        file = f"{name}{'-4-layers' * cut}.json"
        (HERE / "traces" / file).write_text(ya.Program(found, ()).to_json() + "\n")
        billions = sum(unit.numel for unit in found.units) / 1e9
        about = f"{'the first ' * cut}{config.layers} layers, {billions:.1f}B parameters, {tokens} tokens a microbatch"
        listed.append({"file": file, "title": name, "about": about, "tokens": tokens, "gpus": gpus})
    (HERE / "traces" / "index.json").write_text(json.dumps(listed, indent=2) + "\n")


SHIPPED = (("llama3.2-1b", 4096, 16), ("llama2-7b", 2048, 64), ("llama2-70b", 2048, 256))
"""Models by name, tokens of a rank in a microbatch, and the GPUs to begin with."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["build", "traces"])
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "site" / "playground")
    given = parser.parse_args()
    build(given.out) if given.what == "build" else traces()
