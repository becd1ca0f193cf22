"""Trains the small model that kvbench ships: a Llama of 5.2 M parameters that finds what stands in a long text.

Tokenizer and model come from text made here (generated prose, needles, passkeys, key-value lists, repeats) and one
seed. A curriculum on two CPU cores: first induction on repeated segments, then lookup by key, then longer and longer
contexts. Layer 0 starts as previous-token heads; without that, induction takes many times as long to form.

    python scripts/train_tiny_model.py --out DIR --resume                # some hours; the same line goes on later
    python scripts/train_tiny_model.py --out DIR --resume --minutes 30   # half an hour of it
    python scripts/train_tiny_model.py --smoke                           # a minute: repeats are learnt, or exit code 1

DIR then holds the model as transformers loads it, `training.json` (the curve, and exact answers by task and length at
full KV) and `checkpoint.pt`. The last line printed is a JSON object. Where others use the same cores, set
OMP_WAIT_POLICY=PASSIVE: threads that spin while they wait take the time they wait for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from kvbench.backends.hf.streamed import slow_in_bfloat16
from kvbench.tasks import Sample, passkey
from kvbench.tasks.passkey import Passkey
from kvbench.tasks.ruler import prose
from kvbench.tasks.ruler.task import ADJECTIVES, NEW_TOKENS, NOUNS, SUBSETS, Needles, Niah, draw

PAD, BOS, EOS = 0, 1, 2
SPECIALS = ["<pad>", "<bos>", "<eos>"]
VOCABULARY = 4096  # half of the keys' words are one token each
ROPE_THETA = 500_000.0
WINDOW = 16_384
REST_WEIGHT = 0.3  # of the loss on everything that is no answer
# Which value is meant shows in the first tokens of an answer; the others follow from them.
DECISIVE, FOLLOWING_WEIGHT = 2, 0.2


def autocast(device: str) -> torch.autocast:
    """Matrix products in bfloat16, but on a CPU that is slow in them: training takes eight times as long there."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=not (device == "cpu" and slow_in_bfloat16()))


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum.

    Attributes:
        rows: sequences of `length` tokens in a step.
        rate: learning rates at the start and the end, falling along a cosine between.
        mixture: weights of the sources, keys of `SOURCES`.
    """

    steps: int
    length: int
    rows: int
    rate: tuple[float, float]
    mixture: dict[str, float]


LOOKUP = {"repeats": 0.12, "lists": 0.5, "needles": 0.33, "tasks": 0.05}
RETRIEVAL = {"repeats": 0.05, "lists": 0.25, "needles": 0.45, "tasks": 0.22, "plain": 0.03}
WHOLE_TASKS = {"repeats": 0.05, "lists": 0.1, "needles": 0.3, "tasks": 0.55}

# 6k tokens a step, 8k in the last stage. The model answers at twice the length it was trained on almost for free, so
# that each longer stage starts from answers that are mostly right and needs fewer steps.
CURRICULUM = (
    Stage(300, 64, 96, (2.5e-3, 2.5e-3), {"repeats": 1}),
    Stage(900, 192, 32, (2.0e-3, 1.5e-3), LOOKUP),
    Stage(400, 384, 16, (1.5e-3, 1.1e-3), RETRIEVAL),
    Stage(500, 768, 8, (1.1e-3, 8e-4), RETRIEVAL),
    Stage(500, 1536, 4, (8e-4, 5e-4), RETRIEVAL),
    Stage(400, 3072, 2, (5e-4, 3e-4), RETRIEVAL),
    Stage(220, 6144, 1, (3e-4, 3e-5), RETRIEVAL),
    Stage(150, 8192, 1, (2e-4, 2e-5), WHOLE_TASKS),
)

# The quickest way to see induction form: two layers, and few enough words that each is met often.
SMOKE = (Stage(200, 64, 64, (4e-3, 4e-3), {"repeats": 1}),)
SMOKE_VOCABULARY = 768
WARM_UP = 60

EVALUATED_LENGTHS = (512, 1024, 2048, 4096, 8192)
EVALUATED_SUBSETS = ("niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2")


# -- text --------------------------------------------------------------------------------------------------------------

Row = tuple[list[int], list[bool]]  # token ids, and whether each belongs to an answer

QUESTIONS = ("mentioned in the provided text", "in the text", "above", "that was given", "as stated before")
LEADS = ("", "for ", "One of the numbers for ", "One of the special magic numbers for ")


@dataclass(frozen=True)
class Text:
    """Writes training rows; each is a function of its random generator, so that no state is kept between steps."""

    tokenizer: Tokenizer
    rates: dict[str, float] = field(default_factory=dict)

    def row(self, source: str, length: int, rng: random.Random) -> Row:
        """At most `length` tokens of a source, <bos> in front."""
        ids, answers = getattr(self, source)(length - 1, rng)
        return [BOS, *ids][:length], [False, *answers][:length]

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def pieces(self, pieces: Iterable[tuple[str, bool]]) -> Row:
        """Texts one after the other, each with its mark; they meet where the tokenizer would cut anyway."""
        texts, marks = zip(*pieces, strict=True)
        ids: list[int] = []
        answers: list[bool] = []
        for encoded, mark in zip(self.tokenizer.encode_batch(texts, add_special_tokens=False), marks, strict=True):
            ids += encoded.ids
            answers += [mark] * len(encoded.ids)
        return ids, answers

    def repeats(self, length: int, rng: random.Random) -> Row:
        """Segments that come again at random distances: a fixed distance would be solved by position alone."""
        ids: list[int] = []
        answers: list[bool] = []
        segments: list[list[int]] = []
        while len(ids) < length:
            if segments and rng.random() < 0.6:
                segment = rng.choice(segments)
                segment = segment[rng.randrange(max(1, len(segment) - 4)) :]
                # The first two tokens cannot be known to be a repetition.
                answers += [place > 1 for place in range(len(segment))]
            else:
                segment = self._segment(rng.randint(6, 24), rng)
                segments.append(segment)
                answers += [False] * len(segment)
            ids += segment
        return ids[:length], answers[:length]

    def _segment(self, size: int, rng: random.Random) -> list[int]:
        if rng.random() < 0.6:
            return [rng.randrange(len(SPECIALS), self.tokenizer.get_vocab_size()) for _ in range(size)]
        return self.encode("".join(" " + _word(rng) for _ in range(size)))[:size]

    def lists(self, length: int, rng: random.Random) -> Row:
        """Many facts "KEY is: VALUE.", then as many questions as fit: lookup by key across a gap of some words."""
        kind = rng.choices(("numbers", "words", "keys"), (0.45, 0.43, 0.12))[0]
        digits, lead = rng.choice((3, 5, 7)), rng.choice(LEADS)
        facts: dict[str, str] = {}
        while len(facts) < max(2, length // 36):
            key = _key(rng)
            # A key for its own value: what carries a key across the gap can then be learnt by itself.
            facts[key] = {"numbers": _digits(digits, rng), "words": _word(rng), "keys": key}[kind]
        told: list[int] = []
        keys = []
        for key, value in facts.items():
            fact = f" {lead}{key} is: {value}."
            if rng.random() < 0.3:
                fact += "".join(" " + _word(rng) for _ in range(rng.randint(3, 12))) + "."
            ids = self.encode(fact)
            if len(told) + len(ids) > 0.62 * length:
                break
            told += ids
            keys.append(key)
        rng.shuffle(keys)
        asked, answers = self.pieces(piece for key in keys for piece in _question(key, facts[key], lead, rng))
        return told + asked, [False] * len(told) + answers

    def needles(self, length: int, rng: random.Random) -> Row:
        """Several keys in a text, and several of RULER's questions, one after the other."""
        most = max(1, length // 48)
        hidden = rng.randint(1, most) if rng.random() < 0.5 else _log_uniform(most, rng)
        while True:
            asked = rng.randint(1, hidden)
            head, needles, questions = self._hidden(hidden, asked, rng)
            room = length - sum(len(ids) for ids, _ in (head, questions)) - sum(map(len, needles))
            if room >= 0 or hidden == 1:
                break
            hidden = max(1, hidden // 2)
        filler = self._filler(max(0, room), rng)
        for ids in needles:
            filler.insert(rng.randint(0, len(filler)), ids)
        body = [token for ids in filler for token in ids]
        return head[0] + body + questions[0], head[1] + [False] * len(body) + questions[1]

    def _hidden(self, hidden: int, asked: int, rng: random.Random) -> tuple[Row, list[list[int]], Row]:
        """Head, needles and questions with answers."""
        kind = rng.choices(("numbers", "uuids", "words"), (0.6, 0.1, 0.3))[0]
        writer = Needles("essay", "words", kind, 1, 1, 1, prose.words)
        keys = list(dict.fromkeys(_key(rng) for _ in range(hidden)))
        if kind == "numbers" and rng.random() < 0.3:
            digits = rng.randint(3, 6)
            values = [_digits(digits, rng) for _ in keys]
        else:
            values = draw(kind, len(keys), rng)
        needles = [self.encode(" " + writer.needle(key, value)) for key, value in zip(keys, values, strict=True)]
        pieces = []
        for place in rng.sample(range(len(keys)), min(asked, len(keys))):
            frame, question = writer.asking([keys[place]])
            pieces += [("\n" + question, False), (f" {values[place]}.", True)]
        ids, answers = self.pieces(pieces)
        head = self.encode(frame.partition("{context}")[0])
        return (head, [False] * len(head)), needles, ([*ids, EOS], [*answers, True])

    def _filler(self, room: int, rng: random.Random) -> list[list[int]]:
        """Sentences of exactly `room` tokens; the last is cut."""
        kind = rng.choices(("prose", "noise", "words"), (0.6, 0.25, 0.15))[0]
        if kind == "prose":
            source: Iterator[str] = (" " + text for text in prose.sentences(rng.random().hex()))
        elif kind == "noise":
            source = iter(lambda: "\n" + passkey.FILLER, None)
        else:
            source = iter(lambda: "".join(" " + _word(rng) for _ in range(rng.randint(5, 20))) + ".", None)
        found: list[list[int]] = []
        while room > 0:
            for encoded in self.tokenizer.encode_batch(list(islice(source, 16)), add_special_tokens=False):
                found.append(list(encoded.ids)[: max(0, room)])
                room -= len(found[-1])
        return [ids for ids in found if ids]

    def tasks(self, length: int, rng: random.Random) -> Row:
        """A whole prompt of a task, with its answer and <eos>; needles where the length is too short for any."""
        for name in rng.sample(("passkey", "passkey", *SUBSETS), 4):
            written = self._passkey(length, rng) if name == "passkey" else self._niah(name, length, rng)
            if written is not None:
                return written
        return self.needles(length, rng)

    def _passkey(self, length: int, rng: random.Random) -> Row | None:
        size = int((length - self.rates["passkey frame"]) / self.rates["passkey"])
        if size < 0:
            return None
        filler = passkey.FILLER
        if rng.random() < 0.3:
            filler = " ".join(prose.words(rng.random().hex(), size // 5 + 1))
        before = rng.randint(0, size)
        text = " ".join([filler] * (size // (len(filler) + 1) + 1))
        key = rng.randint(1, 10 ** rng.randint(3, 5))
        return self._answered(passkey.prompt(text[:before], key, text[: size - before]), [str(key)], length)

    def _niah(self, name: str, length: int, rng: random.Random) -> Row | None:
        writer = Niah([name], [1]).writers[name]
        room = length - self.rates[f"{name} frame"]
        size = int(room / self.rates[name])
        if size < writer.least:
            return None
        written = writer.write(f"training/{rng.random().hex()}", rng.randrange(1000), size)
        return self._answered(written.text, written.answers, length)

    def _answered(self, prompt: str, values: Iterable[str], length: int) -> Row | None:
        """The prompt and " a, b, and c."; None where that is too long after all."""
        listed = list(values)
        answer = listed[0] if len(listed) == 1 else ", ".join(listed[:-1]) + ", and " + listed[-1]
        ids, answers = self.pieces([(prompt, False), (f" {answer}.", True)])
        return None if len(ids) >= length else ([*ids, EOS], [*answers, True])

    def plain(self, length: int, rng: random.Random) -> Row:
        """Prose alone."""
        ids = [token for sentence in self._filler(length, rng) for token in sentence]
        return ids, [False] * len(ids)


SOURCES = ("repeats", "lists", "needles", "tasks", "plain")


def text_of(tokenizer: Tokenizer) -> Text:
    """Training text for a tokenizer; how many tokens a task's frame and its haystack take is measured once."""
    text = Text(tokenizer)

    def tokens(prompt: str) -> int:
        return len(text.encode(prompt))

    # A little over the mean, so that few prompts turn out too long.
    short, long = passkey.prompt("", 50_000, ""), passkey.prompt(f"{passkey.FILLER} " * 40, 50_000, "")
    text.rates["passkey"] = 1.02 * (tokens(long) - tokens(short)) / (len(long) - len(short))
    text.rates["passkey frame"] = tokens(short) + 12
    for name, writer in Niah(SUBSETS, [1]).writers.items():
        few, many = (tokens(writer.write("training", 0, size).text) for size in (40, 440))
        text.rates[name] = 1.03 * (many - few) / 400
        text.rates[f"{name} frame"] = few - 40 * (many - few) / 400 + 60 * writer.queries * writer.values
    return text


def _word(rng: random.Random) -> str:
    return rng.choice(NOUNS if rng.random() < 0.6 else ADJECTIVES)


def _key(rng: random.Random) -> str:
    return _word(rng) if rng.random() < 0.3 else f"{_word(rng)}-{_word(rng)}"


def _digits(count: int, rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def _question(key: str, value: str, lead: str, rng: random.Random) -> list[tuple[str, bool]]:
    """A question and its answer: as the fact was told, with the key right before its "is", or some words after it."""
    style = rng.random()
    if style < 0.15:
        asked = f" {lead}{key} is:"
    elif style < 0.35:
        asked = f"\n{key} is"
    else:
        words = " ".join(_word(rng) for _ in range(rng.randint(1, 6)))
        asked = f"\nThe number for {key} {rng.choice(QUESTIONS) if style < 0.7 else words} is"
    return [(asked, False), (f" {value}.", True)]


def _log_uniform(most: int, rng: random.Random) -> int:
    return min(most, int(math.exp(rng.uniform(0, math.log(most + 1)))))


# -- tokenizer and model -----------------------------------------------------------------------------------------------


def train_tokenizer(seed: int, prompts: int, vocabulary: int = VOCABULARY) -> Tokenizer:
    """Byte-level BPE from prose, passkeys and needles; every digit a token, the first with the space before it.

    So an answer's first token follows its "is:" at once and tells which value is meant.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r" ?\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    writers = list(Niah(SUBSETS, [1]).writers.values())
    texts = [writer.write(f"tokenizer/{seed}/{index}", seed, 60).text for index in range(prompts) for writer in writers]
    texts += [passkey.prompt(passkey.FILLER, index, passkey.FILLER) for index in range(prompts)]
    texts += list(islice(prose.sentences(f"tokenizer/{seed}"), 60 * prompts))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    return tokenizer


def new_model(layers: int, vocabulary: int) -> LlamaForCausalLM:
    """Random weights, but for layer 0: its head h attends h + 1 tokens back."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    look_back(model)
    return model


@torch.no_grad()
def look_back(model: LlamaForCausalLM, amplitude: float = 4.0, frequencies: int = 14) -> None:
    """Make the heads of layer 0 previous-token heads, through their biases.

    Before the rotary embedding all keys are nearly one vector, `amplitude` on the fastest frequencies; the query of
    head h is that vector turned back by h + 1 positions, so that q.k is largest h + 1 tokens back.
    """
    attention, config = model.model.layers[0].self_attn, model.config
    dim, half = config.head_dim, config.head_dim // 2
    angle = ROPE_THETA ** (-torch.arange(half) / half)
    constant = torch.zeros(half)
    constant[:frequencies] = amplitude
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight.mul_(0.2)
        projection.bias.zero_()
    for head in range(config.num_key_value_heads):
        attention.k_proj.bias[head * dim : head * dim + half] = constant
    for head in range(config.num_attention_heads):
        start, back = head * dim, head + 1
        attention.q_proj.bias[start : start + half] = constant * torch.cos(back * angle)
        attention.q_proj.bias[start + half : start + dim] = -constant * torch.sin(back * angle)


def new_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW; biases and norms do not decay, or layer 0 would forget where it looks."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))


# -- training ----------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """A model on its way through a curriculum; all that a checkpoint holds.

    Attributes:
        step: steps done.
        seconds: spent so far, over all calls.
        curve: one entry every `LOGGED_EVERY` steps; losses and the share of right answer tokens are means over them.
        answers: exact answers by task and length, at the end of each stage.
    """

    text: Text
    model: LlamaForCausalLM
    optimizer: torch.optim.Optimizer
    curriculum: tuple[Stage, ...]
    seed: int
    device: str = "cpu"
    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Of the whole curriculum."""
        return sum(stage.steps for stage in self.curriculum)

    def place(self) -> tuple[Stage, int]:
        """The stage of the next step, and the steps of it already done."""
        before = self.step
        for stage in self.curriculum:
            if before < stage.steps:
                return stage, before
            before -= stage.steps
        raise IndexError("the curriculum is done")

    def learn(self) -> dict[str, float]:
        """One step; its losses on answers and on the rest, and the share of right answer tokens."""
        stage, done = self.place()
        rate = _cosine(*stage.rate, done / stage.steps) * min(1.0, (self.step + 1) / WARM_UP)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        ids, answers = (part.to(self.device) for part in self.batch(stage))
        wanted, answer = ids[:, 1:], answers[:, 1:]
        # Of the rest every fourth token, another one each step: the vocabulary costs as much as two layers.
        places = torch.arange(answer.numel(), device=self.device).view(answer.shape)
        rest = ~answer & (wanted != PAD) & (places % 4 == self.step % 4)
        learnt = answer | rest
        with autocast(self.device):
            hidden = self.model.model(ids).last_hidden_state
            logits = torch.nn.functional.linear(hidden[:, :-1][learnt], self.model.lm_head.weight)
        losses = torch.nn.functional.cross_entropy(logits.float(), wanted[learnt], reduction="none")
        weights, is_answer = answer_weights(answer)[learnt], answer[learnt]
        on_answers = (losses * weights).sum() / weights.sum().clamp(min=1)
        on_rest = (losses * ~is_answer).sum() / (~is_answer).sum().clamp(min=1)
        self.optimizer.zero_grad()
        (on_answers + REST_WEIGHT * on_rest).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        right = ((logits.argmax(-1) == wanted[learnt]) & is_answer).sum() / is_answer.sum().clamp(min=1)
        return {"answers": on_answers.item(), "rest": on_rest.item(), "right": right.item()}

    def batch(self, stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and answer marks [rows, length] of the next step; a function of the seed and the step alone."""
        rng = random.Random(f"tiny/{self.seed}/{self.step}")
        # Some steps with more and shorter rows, so that longer contexts do not make short ones forgotten.
        parts = 1 if stage.length < 384 else rng.choice((1, 1, 1, 2, 4))
        length, rows = stage.length // parts, stage.rows * parts
        names = rng.choices(list(stage.mixture), list(stage.mixture.values()), k=rows)
        found = [self.text.row(name, length, rng) for name in names]
        ids = torch.tensor([ids + [PAD] * (length - len(ids)) for ids, _ in found])
        answers = torch.tensor([marks + [False] * (length - len(marks)) for _, marks in found])
        return ids, answers

    def save(self, path: Path) -> None:
        """Write a checkpoint; a crash on the way leaves the last one."""
        state = {
            "tokenizer": self.text.tokenizer.to_str(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "identity": self.identity(),
            **{key: getattr(self, key) for key in ("step", "seconds", "curve", "answers")},
        }
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        os.replace(unfinished, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            SystemExit: it belongs to another seed or curriculum.
        """
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["identity"] != self.identity():
            raise SystemExit(f"{path}: of another seed, stretch or curriculum; choose another --out, or remove it")
        self.text = text_of(Tokenizer.from_str(state["tokenizer"]))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for key in ("step", "seconds", "curve", "answers"):
            setattr(self, key, state[key])

    def identity(self) -> str:
        """What a checkpoint must share with the training that goes on from it."""
        return f"seed {self.seed}, {self.model.config.num_hidden_layers} layers, {self.curriculum}"


def answer_weights(answers: torch.Tensor) -> torch.Tensor:
    """Weights of the losses [rows, length]: 1 for the first tokens of an answer, less for those behind, 0 elsewhere."""
    places = torch.arange(answers.shape[1], device=answers.device).expand_as(answers)
    before = torch.where(answers, -1, places).cummax(dim=1).values
    return torch.where(places - before <= DECISIVE, 1.0, FOLLOWING_WEIGHT) * answers


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


LOGGED_EVERY = 25


def train(training: Training, out: Path, minutes: float, checkpoint_minutes: float, samples: int) -> None:
    """Train until the curriculum or the minutes end; evaluate and export after each stage from 384 tokens on."""
    start = saved = time.monotonic()
    before = training.seconds
    seen: list[dict[str, float]] = []
    training.model.train()
    while training.step < training.steps and time.monotonic() - start < 60 * minutes:
        stage, done = training.place()
        seen.append(training.learn())
        training.seconds = before + time.monotonic() - start
        if len(seen) == LOGGED_EVERY or done + 1 == stage.steps:
            training.curve.append(logged(training, stage, seen))
            print(json.dumps(training.curve[-1]), flush=True)
            seen = []
        if done + 1 == stage.steps and samples and stage.length >= 384:
            training.answers.append(
                {"step": training.step, "length": stage.length, "exact": evaluate(training, 2 * stage.length, samples)}
            )
            print(json.dumps(training.answers[-1]), flush=True)
            export(training, out)
        if time.monotonic() - saved > 60 * checkpoint_minutes:
            training.save(out / "checkpoint.pt")
            saved = time.monotonic()
    training.save(out / "checkpoint.pt")
    export(training, out)


def logged(training: Training, stage: Stage, seen: list[dict[str, float]]) -> dict[str, float]:
    """An entry of the curve."""
    means = {key: round(sum(entry[key] for entry in seen) / len(seen), 4) for key in seen[0]}
    return {"step": training.step, "length": stage.length, "seconds": round(training.seconds), **means}


def evaluate(training: Training, longest: int, samples: int) -> dict[str, float]:
    """Share of exact answers of passkey and niah at full KV, by task and length up to `longest` tokens."""
    tokenizer = wrapped(training.text.tokenizer)
    lengths = [length for length in EVALUATED_LENGTHS if length <= longest]
    exact: dict[str, list[bool]] = {}
    training.model.eval()
    for length in lengths:
        found: list[Sample] = list(islice(Passkey([length]).samples(tokenizer, 0), samples))
        # RULER's lengths hold the answer's tokens, which are few here.
        found += Niah(EVALUATED_SUBSETS, [length + NEW_TOKENS], samples).samples(tokenizer, 0)
        for sample in found:
            name = sample.id.partition("-")[0]
            exact.setdefault(f"{name}/{length}", []).append(answered(training, tokenizer, sample))
    training.model.train()
    return {name: sum(right) / len(right) for name, right in exact.items()}


@torch.no_grad()
def answered(training: Training, tokenizer: PreTrainedTokenizerFast, sample: Sample) -> bool:
    """Whether greedy decoding would give the answer, a full stop after it: one pass over prompt and answer."""
    answer = training.text.encode(f" {sample.answers[0]}.")
    prompt = tokenizer(sample.prompt + sample.answer_prefix)["input_ids"]
    ids = torch.tensor([prompt + answer], device=training.device)
    with autocast(training.device):
        logits = training.model(ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
    return logits.argmax(-1).tolist() == answer


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers has it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIALS[PAD],
        bos_token=SPECIALS[BOS],
        eos_token=SPECIALS[EOS],
        padding_side="left",
        model_max_length=WINDOW,
        clean_up_tokenization_spaces=False,
    )


def export(training: Training, out: Path) -> None:
    """Write model (bfloat16), tokenizer and curve into `out`; each file is whole, the old or the new one."""
    log = {"seed": training.seed, "steps": training.step, "seconds": round(training.seconds)}
    with tempfile.TemporaryDirectory(dir=out) as unfinished:
        model = LlamaForCausalLM(training.model.config)
        model.load_state_dict(training.model.state_dict())
        model.to(torch.bfloat16).save_pretrained(unfinished)
        wrapped(training.text.tokenizer).save_pretrained(unfinished)
        _name_tokenizer_class(Path(unfinished, "tokenizer_config.json"))
        Path(unfinished, "training.json").write_text(
            json.dumps({**log, "answers": training.answers, "curve": training.curve}) + "\n"
        )
        for file in sorted(Path(unfinished).iterdir()):
            file.chmod(0o644)  # safetensors writes for the owner alone
            os.replace(file, out / file.name)


def _name_tokenizer_class(path: Path) -> None:
    # transformers 5 writes a class of its own, which neither older releases nor other libraries know.
    settings = json.loads(path.read_text())
    settings.pop("backend", None)
    path.write_text(json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n")


# -- the command -------------------------------------------------------------------------------------------------------


def smoke(out: Path, seed: int, device: str) -> dict[str, Any]:
    """A small model for under a minute; fails where the loss on repetitions does not fall by half.

    Raises:
        SystemExit: it does not, or the files do not load again.
    """
    torch.manual_seed(seed)
    model = new_model(2, SMOKE_VOCABULARY).to(device)
    text = text_of(train_tokenizer(seed, 20, SMOKE_VOCABULARY))
    training = Training(text, model, new_optimizer(model), SMOKE, seed, device)
    train(training, out, math.inf, math.inf, samples=0)
    again = Training(text, model, new_optimizer(model), SMOKE, seed, device)
    again.load(out / "checkpoint.pt")
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    if (again.step, loaded.dtype, tokenizer("is: 12")["input_ids"][0]) != (SMOKE[0].steps, torch.bfloat16, BOS):
        raise SystemExit("smoke: the checkpoint or the exported model is not what was trained")
    first, last = training.curve[0]["answers"], training.curve[-1]["answers"]
    result = {"first_loss": first, "last_loss": last, "steps": training.step, "seconds": round(training.seconds, 1)}
    if last > first / 2:
        raise SystemExit(f"smoke: the loss on repetitions did not fall by half: {json.dumps(result)}")
    return result


def stretched(curriculum: tuple[Stage, ...], factor: float) -> tuple[Stage, ...]:
    """The same stages with `factor` times the steps."""
    return tuple(
        Stage(max(1, round(stage.steps * factor)), stage.length, stage.rows, stage.rate, stage.mixture)
        for stage in curriculum
    )


def full(options: argparse.Namespace) -> dict[str, Any]:
    """The whole training, or the next part of it."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists() and not options.resume:
        raise SystemExit(f"{checkpoint}: a training is under way here; --resume goes on with it")
    torch.manual_seed(options.seed)
    model = new_model(6, VOCABULARY).to(options.device)
    resumed = checkpoint.exists()
    tokenizer = Tokenizer.from_str(torch.load(checkpoint, weights_only=True)["tokenizer"]) if resumed else None
    text = text_of(tokenizer or train_tokenizer(options.seed, 300))
    curriculum = stretched(CURRICULUM, options.stretch)
    training = Training(text, model, new_optimizer(model), curriculum, options.seed, options.device)
    if resumed:
        training.load(checkpoint)
    train(training, out, options.minutes, options.checkpoint_minutes, options.samples)
    exact = training.answers[-1]["exact"] if training.answers else {}
    done = training.step == training.steps
    return {"out": str(out), "step": training.step, "of": training.steps, "done": done, "exact": exact}


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder for the model, the log and the checkpoint")
    parser.add_argument("--smoke", action="store_true", help="a minute, to see that it learns; exit code 1 if not")
    parser.add_argument("--resume", action="store_true", help="go on from --out's checkpoint, if there is one")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop after these, to be resumed (default: none)"
    )
    parser.add_argument("--checkpoint-minutes", type=float, default=5, help="between checkpoints (default: 5)")
    parser.add_argument("--samples", type=int, default=20, help="per task and length of an evaluation (default: 20)")
    parser.add_argument("--stretch", type=float, default=1.0, help="times the steps of each stage (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of everything (default: 0)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.smoke:
        with tempfile.TemporaryDirectory() as folder:
            result = smoke(Path(options.out or folder), options.seed, options.device)
    elif options.out:
        result = full(options)
    else:
        parser.error("--out is needed")
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
