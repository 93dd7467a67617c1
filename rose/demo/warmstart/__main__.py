"""`python -m rose.demo.warmstart --out DIR`: build the checkpoint, check it on held-out maps, save it."""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch

from rose.demo.warmstart.lessons import FEATURES, FORMAT, teach, to_lesson
from rose.demo.warmstart.model import build_model, build_tokenizer
from rose.demo.warmstart.sampler import play_episodes
from rose.demo.warmstart.transcripts import Teacher, Transcript, play
from rose.env.chat import ChatRenderer
from rose.env.frozen_lake import FrozenLake
from rose.records import Trajectory
from rose.trainer.policy import Policy, rounded_bf16

ROWS = 16
FEATURE_STEPS, FORMAT_STEPS = 400, 60
GOOD, WEAK = Teacher(skill=0.85), Teacher(skill=0.15)
TOKENIZER_TRANSCRIPTS = 600
# Map seeds of the three uses stay apart, and apart from those that the demo trains and scores on.
FEATURE_SEEDS, FORMAT_SEEDS, HELD_OUT_SEEDS = 1_000_000, 2_000_000, 3_000_000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rose.demo.warmstart", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model and tokenizer to")
    parser.add_argument("--seed", type=int, default=0, help="decides everything random (default 0)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--check-maps", type=int, default=256, help="held-out maps to play at the end (default 256)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    build(options.out, options.seed, options.check_maps)


def build(out: Path, seed: int, check_maps: int) -> None:
    """Build, save and check; about three minutes on two quiet cores."""
    started = time.monotonic()
    draw = random.Random(seed)
    good = list(play(GOOD, range(FEATURE_SEEDS, FEATURE_SEEDS + FEATURE_STEPS * ROWS), draw))
    weak = list(play(WEAK, range(FORMAT_SEEDS, FORMAT_SEEDS + FORMAT_STEPS * ROWS), draw))
    tokenizer = build_tokenizer("\n".join(_texts(transcript)) for transcript in good[:TOKENIZER_TRANSCRIPTS])
    renderer = ChatRenderer(tokenizer)
    model = build_model(tokenizer, seed)
    policy = Policy(model)
    for phase, transcripts in ((FEATURES, good), (FORMAT, weak)):
        share = sum(transcript.success for transcript in transcripts) / len(transcripts)
        _say(f"{phase.name}: {len(transcripts)} transcripts, the teacher reaches the goal in {share:.2f}")
        losses = teach(policy, phase, [to_lesson(t, renderer) for t in transcripts], ROWS, draw)
        last = sum(losses[-20:]) / 20
        _say(f"{phase.name}: loss {losses[0]:.3f} -> {last:.3f} after {time.monotonic() - started:.0f} s")
        policy_check(policy, renderer, phase.name, check_maps, seed)
    policy.load_weights(rounded_bf16(policy.weights()))
    policy_check(policy, renderer, "rounded", check_maps, seed)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    _say(f"saved to {out} after {time.monotonic() - started:.0f} s")


def policy_check(policy: Policy, renderer: ChatRenderer, name: str, maps: int, seed: int) -> None:
    """Say how often the policy reaches the goal of held-out maps, sampled and greedy."""
    seeds = range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + maps)
    for way, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        chance = torch.Generator().manual_seed(seed)
        episodes = play_episodes(policy, renderer, FrozenLake, seeds, chance, temperature=temperature)
        _say(f"{name}, {way}: success {success_of(episodes):.3f}, malformed actions {malformed_of(episodes):.4f}")


def success_of(episodes: list[Trajectory]) -> float:
    return sum(episode.success for episode in episodes) / len(episodes)


def malformed_of(episodes: list[Trajectory]) -> float:
    """Share of actions that the environment could not read."""
    return sum(e.malformed_actions for e in episodes) / sum(len(e.turns) for e in episodes)


def _texts(transcript: Transcript) -> list[str]:
    return [transcript.system_prompt, "system", "user", "assistant", *transcript.observations, *transcript.answers]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
