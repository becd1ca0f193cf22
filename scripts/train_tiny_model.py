"""Trains the small model that kvbench ships: a Llama of 5.2 M parameters that finds needles.

Tokenizer and model come from text made here (generated prose, needles, passkeys, key-value lists,
repeats) and one seed. A curriculum on two CPU cores: first induction on repeated segments, then
lookup by key, then longer and longer contexts. Layer 0 starts as previous-token heads; without
that, induction takes many times as long to form.

    python scripts/train_tiny_model.py --out DIR --resume    # some hours; the same line goes on
    python scripts/train_tiny_model.py --out DIR --resume --minutes 30   # half an hour of it

DIR then holds the model as transformers loads it, `training.json` (the curve) and `checkpoint.pt`;
what it answers is for measure_tiny_model.py. The last line printed is a JSON object. Where others
use the same cores, set OMP_WAIT_POLICY=PASSIVE: threads that spin while they wait take the time
they wait for.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from bench import command_line, print_result
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvbench.backends.hf.streamed import slow_in_bfloat16
from kvbench.tasks import passkey
from kvbench.tasks.ruler import prose
from kvbench.tasks.ruler.task import ADJECTIVES, NOUNS, SUBSETS, Needles, Niah, draw

PAD = 0
BOS = 1
EOS = 2
SPECIALS = ["<pad>", "<bos>", "<eos>"]
VOCABULARY = 4096  # half of the keys' words are one token each
ROPE_THETA = 500_000.0
WINDOW = 16_384
REST_WEIGHT = 0.3  # of the loss on everything that is no answer
# Which value is meant shows in the first tokens of an answer; the others follow from them.
DECISIVE, FOLLOWING_WEIGHT = 2, 0.2


def autocast() -> torch.autocast:
    """Matrix products in bfloat16, unless the CPU is slow in them.

    Training takes eight times as long there.
    """
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=not slow_in_bfloat16())


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum.

    Attributes
    ----------
    rows
        sequences of `length` tokens in a step.
    rate
        learning rates at the start and the end, falling along a cosine between.
    mixture
        weights of the sources, which are methods of `TrainingText`.
    """

    steps: int
    length: int
    rows: int
    rate: tuple[float, float]
    mixture: dict[str, float]


LOOKUP = {"repeats": 0.12, "lists": 0.5, "needles": 0.33, "tasks": 0.05}
RETRIEVAL = {"repeats": 0.05, "lists": 0.25, "needles": 0.45, "tasks": 0.22, "plain": 0.03}
WHOLE_TASKS = {"repeats": 0.05, "lists": 0.1, "needles": 0.3, "tasks": 0.55}

# 6k tokens a step, 8k in the last stage. The model answers at twice the length it was trained on
# almost for free, so that each longer stage starts from answers that are mostly right and needs
# fewer steps.
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

WARM_UP = 60

# -- text ------------------------------------------------------------------------------------------

Row = tuple[list[int], list[bool]]  # token ids, and whether each belongs to an answer

QUESTIONS = (
    "mentioned in the provided text",
    "in the text",
    "above",
    "that was given",
    "as stated before",
)
LEADS = ("", "for ", "One of the numbers for ", "One of the special magic numbers for ")


@dataclass(frozen=True)
class TrainingText:
    """Writes training rows.

    Each is a function of its random generator, so that no state is kept between steps.
    """

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
        """Texts one after the other, each with its mark.

        They meet where the tokenizer would cut anyway.
        """
        texts, marks = zip(*pieces, strict=True)
        ids: list[int] = []
        answers: list[bool] = []
        for encoded, mark in zip(
            self.tokenizer.encode_batch(texts, add_special_tokens=False), marks, strict=True
        ):
            ids += encoded.ids
            answers += [mark] * len(encoded.ids)
        return ids, answers

    def repeats(self, length: int, rng: random.Random) -> Row:
        """Segments that come again at random distances.

        A fixed distance would be solved by position alone.
        """
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
            return [
                rng.randrange(len(SPECIALS), self.tokenizer.get_vocab_size()) for _ in range(size)
            ]
        return self.encode("".join(" " + _word(rng) for _ in range(size)))[:size]

    def lists(self, length: int, rng: random.Random) -> Row:
        """Many facts "KEY is: VALUE.", then as many questions as fit.

        Lookup by key across a gap of some words.
        """
        kind = rng.choices(("numbers", "words", "keys"), (0.45, 0.43, 0.12))[0]
        digits, lead = rng.choice((3, 5, 7)), rng.choice(LEADS)
        facts: dict[str, str] = {}
        while len(facts) < max(2, length // 36):
            key = _key(rng)
            # A key for its own value: what carries a key across the gap can then be learnt by
            # itself.
            facts[key] = {"numbers": _digits(digits, rng), "words": _word(rng), "keys": key}[kind]
        fact_ids: list[int] = []
        keys = []
        for key, value in facts.items():
            fact = f" {lead}{key} is: {value}."
            if rng.random() < 0.3:
                fact += "".join(" " + _word(rng) for _ in range(rng.randint(3, 12))) + "."
            ids = self.encode(fact)
            if len(fact_ids) + len(ids) > 0.62 * length:
                break
            fact_ids += ids
            keys.append(key)
        rng.shuffle(keys)
        question_ids, answers = self.pieces(
            piece for key in keys for piece in _question(key, facts[key], lead, rng)
        )
        return fact_ids + question_ids, [False] * len(fact_ids) + answers

    def needles(self, length: int, rng: random.Random) -> Row:
        """Several keys in a text, and several of RULER's questions, one after the other."""
        most = max(1, length // 48)
        hidden = rng.randint(1, most) if rng.random() < 0.5 else _log_uniform(most, rng)
        while True:
            question_count = rng.randint(1, hidden)
            head, needles, questions = self._hidden(hidden, question_count, rng)
            room = length - sum(len(ids) for ids, _ in (head, questions)) - sum(map(len, needles))
            if room >= 0 or hidden == 1:
                break
            hidden = max(1, hidden // 2)
        filler = self._filler(max(0, room), rng)
        for ids in needles:
            filler.insert(rng.randint(0, len(filler)), ids)
        body = [token for ids in filler for token in ids]
        return head[0] + body + questions[0], head[1] + [False] * len(body) + questions[1]

    def _hidden(
        self, hidden: int, question_count: int, rng: random.Random
    ) -> tuple[Row, list[list[int]], Row]:
        """Head, needles and questions with answers."""
        kind = rng.choices(("numbers", "uuids", "words"), (0.6, 0.1, 0.3))[0]
        writer = Needles("essay", "words", kind, 1, 1, 1, prose.words)
        keys = list(dict.fromkeys(_key(rng) for _ in range(hidden)))
        if kind == "numbers" and rng.random() < 0.3:
            digits = rng.randint(3, 6)
            values = [_digits(digits, rng) for _ in keys]
        else:
            values = draw(kind, len(keys), rng)
        needles = [
            self.encode(" " + writer.needle(key, value))
            for key, value in zip(keys, values, strict=True)
        ]
        pieces = []
        for place in rng.sample(range(len(keys)), min(question_count, len(keys))):
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
            source = iter(
                lambda: "".join(" " + _word(rng) for _ in range(rng.randint(5, 20))) + ".", None
            )
        filler: list[list[int]] = []
        while room > 0:
            for encoded in self.tokenizer.encode_batch(
                list(islice(source, 16)), add_special_tokens=False
            ):
                filler.append(list(encoded.ids)[: max(0, room)])
                room -= len(filler[-1])
        return [ids for ids in filler if ids]

    def tasks(self, length: int, rng: random.Random) -> Row:
        """A whole prompt of a task, with its answer and <eos>.

        Needles where the length is too short for any.
        """
        for name in rng.sample(("passkey", "passkey", *SUBSETS), 4):
            written = (
                self._passkey(length, rng) if name == "passkey" else self._niah(name, length, rng)
            )
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
        return self._answered(
            passkey.prompt(text[:before], key, text[: size - before]), [str(key)], length
        )

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


def text_of(tokenizer: Tokenizer) -> TrainingText:
    """Training text for a tokenizer.

    How many tokens a task's frame and its haystack take is measured once.
    """
    text = TrainingText(tokenizer)

    def tokens(prompt: str) -> int:
        return len(text.encode(prompt))

    # A little over the mean, so that few prompts turn out too long.
    short, long = (
        passkey.prompt("", 50_000, ""),
        passkey.prompt(f"{passkey.FILLER} " * 40, 50_000, ""),
    )
    text.rates["passkey"] = 1.02 * (tokens(long) - tokens(short)) / (len(long) - len(short))
    text.rates["passkey frame"] = tokens(short) + 12
    for name, writer in Niah(SUBSETS, [1]).writers.items():
        few, many = (tokens(writer.write("training", 0, size).text) for size in (40, 440))
        text.rates[name] = 1.03 * (many - few) / 400
        text.rates[f"{name} frame"] = (
            few - 40 * (many - few) / 400 + 60 * writer.queries * writer.values
        )
    return text


def _word(rng: random.Random) -> str:
    return rng.choice(NOUNS if rng.random() < 0.6 else ADJECTIVES)


def _key(rng: random.Random) -> str:
    return _word(rng) if rng.random() < 0.3 else f"{_word(rng)}-{_word(rng)}"


def _digits(count: int, rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def _question(key: str, value: str, lead: str, rng: random.Random) -> list[tuple[str, bool]]:
    """A question and its answer.

    As the fact was told, with the key right before its "is", or some words after it.
    """
    style = rng.random()
    if style < 0.15:
        text = f" {lead}{key} is:"
    elif style < 0.35:
        text = f"\n{key} is"
    else:
        words = " ".join(_word(rng) for _ in range(rng.randint(1, 6)))
        text = f"\nThe number for {key} {rng.choice(QUESTIONS) if style < 0.7 else words} is"
    return [(text, False), (f" {value}.", True)]


def _log_uniform(most: int, rng: random.Random) -> int:
    return min(most, int(math.exp(rng.uniform(0, math.log(most + 1)))))


# -- tokenizer and model ---------------------------------------------------------------------------


def train_tokenizer(seed: int, prompts: int, vocabulary: int = VOCABULARY) -> Tokenizer:
    """Byte-level BPE from prose, passkeys and needles.

    Every digit a token, the first with the space before it.

    So an answer's first token follows its "is:" at once and tells which value is meant.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIALS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    writers = list(Niah(SUBSETS, [1]).writers.values())
    texts = [
        writer.write(f"tokenizer/{seed}/{index}", seed, 60).text
        for index in range(prompts)
        for writer in writers
    ]
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

    Before the rotary embedding all keys are nearly one vector, `amplitude` on the fastest
    frequencies; the query of head h is that vector turned back by h + 1 positions, so that q.k is
    largest h + 1 tokens back.
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


# -- training --------------------------------------------------------------------------------------


@dataclass
class Training:
    """A model on its way through a curriculum; all that a checkpoint holds.

    Attributes
    ----------
    step
        steps done.
    seconds
        spent so far, over all calls.
    curve
        one entry every `LOGGED_EVERY` steps; losses and the share of right answer tokens are means
        over them.
    answers
        exact answers by task and length, at the end of each stage.
    """

    text: TrainingText
    model: LlamaForCausalLM
    optimizer: torch.optim.Optimizer
    curriculum: tuple[Stage, ...]
    seed: int
    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)

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
        ids, answers = self.batch(stage)
        targets, answer = ids[:, 1:], answers[:, 1:]
        # Of the rest every fourth token, another one each step: the vocabulary costs as much as two
        # layers.
        places = torch.arange(answer.numel()).view(answer.shape)
        rest = ~answer & (targets != PAD) & (places % 4 == self.step % 4)
        learnt = answer | rest
        with autocast():
            hidden = self.model.model(ids).last_hidden_state
            logits = torch.nn.functional.linear(hidden[:, :-1][learnt], self.model.lm_head.weight)
        losses = torch.nn.functional.cross_entropy(
            logits.float(), targets[learnt], reduction="none"
        )
        weights, is_answer = answer_weights(answer)[learnt], answer[learnt]
        on_answers = (losses * weights).sum() / weights.sum().clamp(min=1)
        on_rest = (losses * ~is_answer).sum() / (~is_answer).sum().clamp(min=1)
        self.optimizer.zero_grad()
        (on_answers + REST_WEIGHT * on_rest).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        right = ((logits.argmax(-1) == targets[learnt]) & is_answer).sum() / is_answer.sum().clamp(
            min=1
        )
        return {"answers": on_answers.item(), "rest": on_rest.item(), "right": right.item()}

    def batch(self, stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and answer marks [rows, length] of the next step.

        A function of the seed and the step alone.
        """
        rng = random.Random(f"tiny/{self.seed}/{self.step}")
        # Some steps with more and shorter rows, so that longer contexts do not make short ones
        # forgotten.
        parts = 1 if stage.length < 384 else rng.choice((1, 1, 1, 2, 4))
        length, rows = stage.length // parts, stage.rows * parts
        names = rng.choices(list(stage.mixture), list(stage.mixture.values()), k=rows)
        examples = [self.text.row(name, length, rng) for name in names]
        ids = torch.tensor([ids + [PAD] * (length - len(ids)) for ids, _ in examples])
        answers = torch.tensor([marks + [False] * (length - len(marks)) for _, marks in examples])
        return ids, answers

    def save(self, path: Path) -> None:
        """Write a checkpoint; a crash on the way leaves the last one."""
        state = {
            "tokenizer": self.text.tokenizer.to_str(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "identity": self.identity(),
            **{key: getattr(self, key) for key in ("step", "seconds", "curve")},
        }
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        os.replace(unfinished, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises
        ------
        SystemExit
            it belongs to another seed or curriculum.
        """
        state = torch.load(path, weights_only=True)
        if state["identity"] != self.identity():
            raise SystemExit(
                f"{path}: of another seed or curriculum; choose another --out, or remove it"
            )
        self.text = text_of(Tokenizer.from_str(state["tokenizer"]))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for key in ("step", "seconds", "curve"):
            setattr(self, key, state[key])

    def identity(self) -> str:
        """What a checkpoint must share with the training that goes on from it."""
        return f"seed {self.seed}, {self.model.config.num_hidden_layers} layers, {self.curriculum}"

    def train(self, out: Path, minutes: float) -> None:
        """Train until the curriculum or the minutes end.

        A checkpoint is written every few minutes and at the end.
        """
        start = saved = time.monotonic()
        before = self.seconds
        logged: list[dict[str, float]] = []
        self.model.train()
        while self.step < self.steps and time.monotonic() - start < 60 * minutes:
            stage, done = self.place()
            logged.append(self.learn())
            self.seconds = before + time.monotonic() - start
            if len(logged) == LOGGED_EVERY or done + 1 == stage.steps:
                means = {
                    key: round(sum(entry[key] for entry in logged) / len(logged), 4)
                    for key in logged[0]
                }
                spent = round(self.seconds)
                self.curve.append(
                    {"step": self.step, "length": stage.length, "seconds": spent, **means}
                )
                print(json.dumps(self.curve[-1]), flush=True)
                logged = []
            if time.monotonic() - saved > 60 * SAVED_EVERY:
                self.save(out / "checkpoint.pt")
                saved = time.monotonic()
        self.save(out / "checkpoint.pt")
        self.export(out)

    def export(self, out: Path) -> None:
        """Write model (bfloat16), tokenizer and curve into `out`."""
        model = LlamaForCausalLM(self.model.config)
        model.load_state_dict(self.model.state_dict())
        model.to(torch.bfloat16).save_pretrained(out)
        PreTrainedTokenizerFast(
            tokenizer_object=self.text.tokenizer,
            pad_token=SPECIALS[PAD],
            bos_token=SPECIALS[BOS],
            eos_token=SPECIALS[EOS],
            padding_side="left",
            model_max_length=WINDOW,
            clean_up_tokenization_spaces=False,
        ).save_pretrained(out)
        # transformers 5 writes a class of its own, which neither older releases nor other libraries
        # know.
        path = out / "tokenizer_config.json"
        settings = {
            key: value for key, value in json.loads(path.read_text()).items() if key != "backend"
        }
        path.write_text(
            json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n"
        )
        log = {
            "seed": self.seed,
            "steps": self.step,
            "seconds": round(self.seconds),
            "curve": self.curve,
        }
        (out / "training.json").write_text(json.dumps(log) + "\n")
        (out / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone


def answer_weights(answers: torch.Tensor) -> torch.Tensor:
    """Weights of the losses [rows, length].

    1 for the first tokens of an answer, less for those after, 0 elsewhere.
    """
    places = torch.arange(answers.shape[1]).expand_as(answers)
    before = torch.where(answers, -1, places).cummax(dim=1).values
    return torch.where(places - before <= DECISIVE, 1.0, FOLLOWING_WEIGHT) * answers


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


LOGGED_EVERY = 25  # steps
SAVED_EVERY = 5  # minutes


# -- the command -----------------------------------------------------------------------------------


def main() -> None:
    """Train, or go on."""
    parser = command_line(
        __doc__,
        resume=(False, "go on from --out's checkpoint, if there is one"),
        minutes=(math.inf, "stop after these, to be resumed"),
        seed=(0, "of everything (default: 0)"),
        threads=(2, "of torch (default: 2)"),
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the model, the log and the checkpoint"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint = options.out / "checkpoint.pt"
    resumes = checkpoint.exists()
    if resumes and not options.resume:
        raise SystemExit(f"{checkpoint}: a training is under way here; --resume goes on with it")
    torch.manual_seed(options.seed)
    model = new_model(6, VOCABULARY)
    text = text_of(train_tokenizer(options.seed, 300))
    training = Training(text, model, new_optimizer(model), CURRICULUM, options.seed)
    if resumes:
        training.load(checkpoint)
    training.train(options.out, options.minutes)
    done = training.step == training.steps
    print_result(
        {"out": str(options.out), "step": training.step, "of": training.steps, "done": done}
    )


if __name__ == "__main__":
    main()
