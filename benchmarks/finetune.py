"""`python -m benchmarks.finetune`: a plan of two phases on four ranks trains like one rank, step by step.

A small Qwen3 with random weights is fine-tuned on the Python standard library, tokenized by a BPE that is trained on
it, once under a plan that switches its strategy inside every step, and once on a single rank. Memory per rank is
declared: the least at which the optimal plan switches, so small that long documents need what short ones do not. The
picture is docs/finetune.svg.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import Qwen3Config, Qwen3ForCausalLM

from hotspa.demo import hotspa, write_corpus
from plans.plan_file import read_plan

OUT = Path("runs/finetune")
FIGURE = Path("docs/finetune.svg")
NUM_RANKS, STEPS, SEQUENCES, MAX_LEN = 4, 30, 16, 2048
VOCAB_SIZE = 2048
MEMORIES_MIB = range(24, 97, 4)


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    corpus, model = OUT / "corpus.jsonl", OUT / "qwen3"
    write_corpus(corpus)
    make_model(model, corpus)
    tokenizer, lengths = model / "tokenizer.json", OUT / "lengths.txt"
    hotspa("lengths", corpus, "--tokenizer", tokenizer, "-o", lengths)
    losses = {
        name: run(name, plan, corpus, model)
        for name, plan in (("four", switching_plan(model, lengths)), ("one", one_rank_plan(model, lengths)))
    }
    phases = [f"{p.min_len}..{p.max_len} {p.division.strategy}" for p in read_plan(OUT / "four-plan.yaml").phases]
    apart = [abs(four - one) / one for four, one in zip(losses["four"], losses["one"], strict=True)]
    print(f"\nphases: {', '.join(phases)}")
    first, last = losses["one"][0], losses["one"][-1]
    print(f"loss: {first:.4f} -> {last:.4f} in {STEPS} steps; largest relative difference {max(apart):.1e}")
    draw(losses, apart, phases)
    print(f"wrote {FIGURE}")
    return 0


def switching_plan(model: Path, lengths: Path) -> Path:
    hotspa("profile", "--model", model, "--nproc", NUM_RANKS, "-o", OUT / "four-profile.yaml")
    for mib in MEMORIES_MIB:
        plan = solved("four", NUM_RANKS, mib, model, lengths)
        if plan is not None and len(read_plan(plan).phases) > 1:
            return plan
    sys.exit(f"no optimal plan for {MEMORIES_MIB} MiB switches: nothing to show")


def one_rank_plan(model: Path, lengths: Path) -> Path:
    hotspa("profile", "--model", model, "--nproc", 1, "-o", OUT / "one-profile.yaml")
    plan = solved("one", 1, 2**14, model, lengths)
    assert plan is not None
    return plan


def solved(name: str, num_ranks: int, memory_mib: int, model: Path, lengths: Path) -> Path | None:
    """A plan file; None where memory is too small for any."""
    cluster, plan = OUT / f"{name}-cluster.yaml", OUT / f"{name}-plan.yaml"
    cluster.write_text(
        f"name: {name}\nnodes: 1\nranks_per_node: {num_ranks}\nmemory_bytes: {memory_mib * 2**20}  # declared\n"
        "intra: {latency_s: 1.0e-4, bandwidth_bytes_per_s: 3.0e+9}\n"
    )
    options = ["--profile", OUT / f"{name}-profile.yaml", "--lengths", lengths, "--sequences", SEQUENCES]
    options += ["--max-len", MAX_LEN, "--overlong", "skip", "--precision", "fp32"]
    plan.unlink(missing_ok=True)
    words = ["solve", "--model", model, "--cluster", cluster, *options, "-o", plan]
    subprocess.run([sys.executable, "-m", "hotspa", *map(str, words)], check=False)
    return plan if plan.exists() else None


def run(name: str, plan: Path, corpus: Path, model: Path) -> list[float]:
    """The loss of every step."""
    options = [
        "--init-from",
        model,
        "--lr",
        "1e-3",
        "--warmup-steps",
        10,
        "--lr-schedule",
        "cosine",
        "--min-lr",
        "1e-4",
    ]
    hotspa("run", plan, "--data", corpus, "--steps", STEPS, "--out", OUT / name, *options)
    rows = (OUT / name / "metrics.jsonl").read_text().splitlines()
    return [float(json.loads(row)["loss"]) for row in rows]


def make_model(folder: Path, corpus: Path) -> None:
    """A Hugging Face folder: configuration, random weights, tokenizer."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    texts = (json.loads(line)["text"] for line in corpus.read_text().splitlines())
    trainer = BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def draw(losses: dict[str, list[float]], apart: list[float], phases: list[str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = range(1, STEPS + 1)
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "hotspa"}):
        figure, (above, below) = pyplot.subplots(
            2, 1, figsize=(8, 4.2), sharex=True, layout="constrained", height_ratios=(3, 1)
        )
        above.plot(steps, losses["one"], color="lightgrey", linewidth=6, label="one rank")
        above.plot(steps, losses["four"], color="tab:blue", linewidth=1.5, label=f"four ranks: {', '.join(phases)}")
        above.set_ylabel("loss")
        above.legend(frameon=False)
        above.set_title("A Qwen3-shaped model on the Python standard library, fp32", loc="left")
        below.semilogy(steps, [max(gap, 1e-9) for gap in apart], color="tab:red", linewidth=1)
        below.set_ylabel("relative\ndifference")
        below.set_xlabel("step")
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(FIGURE, metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
