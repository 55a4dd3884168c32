"""Rows of docs/benchmarks/quality.md: data sets, methods, and which are measured on which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.published_sets import divided_industrial
from rayrec.pipelines.evaluation.lists import MODEL, MODEL_UNMASKED

Ties = Literal["shuffled", "file order"]
TIES: tuple[Ties, ...] = ("shuffled", "file order")
NEIGHBORS = "neighbors"
"""In the place of a method: what needs no training."""
BASELINE = "sasrec"
"""What every row is compared with."""
IN_FILE_ORDER = ("sasrec-stored", "tiger-stored", "generative")
"""Methods that show what the order of a file leaks: two that learn it, and one that redraws it."""
ELSEWHERE = ("sasrec", "generative", "hybrid")
"""Methods that are measured on all data sets: a strong baseline, and the best two of those that generate."""
ELSEWHERE_WITH_TEXT = (*ELSEWHERE, "sasrec-content", "generative-content", "codes-sasrec")
"""Likewise where items have words."""


@dataclass(frozen=True)
class PublishedIds:
    """Semantic IDs that somebody else made."""

    file: str
    """Below the folder of the source."""
    key_offset: int = 0
    """What its keys lack of those of the log."""


@dataclass(frozen=True)
class DataSet:
    """A published log."""

    title: str
    source: str
    """Its folder among the sources."""
    size: str = ""
    """In words."""
    prepare: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `rayrec prepare` besides the order of ties."""
    protocol: str = "Leave-one-out; items of the history excluded."
    """What is predicted, of whom, and what may be recommended, in words."""
    seen: Literal["masked", "kept"] = "masked"
    """Whether items of a history may be recommended, in validation and test."""
    ties: tuple[Ties, ...] = TIES
    """Orders of ties that it is measured with."""
    methods: tuple[str, ...] | None = None
    """Those that are to be measured; None: all."""
    has_text: bool = True
    """Whether items have texts; without, semantic IDs are made of interactions alone."""
    published_ids: PublishedIds | None = None
    rewritten: Callable[[Path, Path], None] | None = None
    """Writes the source in a layout that `rayrec prepare` reads, into a folder; None: it is read as it is."""

    @property
    def settings(self) -> list[str]:
        """What differs from a method's config."""
        return ["evaluation.exclude_seen=false"] if self.seen == "kept" else []

    @property
    def shown_list(self) -> str:
        """Name of the list of models that its tables show."""
        return MODEL_UNMASKED if self.seen == "kept" else MODEL

    def measures(self, name: str, ties: str) -> bool:
        """Whether a method is to be measured on it."""
        if ties not in METHODS[name].ties or (ties == "file order" and name not in IN_FILE_ORDER):
            return False
        if METHODS[name].vectors == "published":
            return self.published_ids is not None and self._has(name.removesuffix("-published"))
        return self._has(name)

    def _has(self, name: str) -> bool:
        return self.methods is None or name in self.methods


@dataclass(frozen=True)
class Published:
    """A figure of somebody else: events of a day in file order, a split of their own making."""

    dataset: str
    recall_at_10: float
    where: str


@dataclass(frozen=True)
class Method:
    """One recipe, the same for every data set."""

    title: str
    config: str
    vectors: str | None = None
    """What the semantic IDs are made of, where there are any; `published`: somebody else made them; the name
    of a method: the vectors that it scores items by, trained with seed 0."""
    tokenizer: str = "rq_kmeans"
    max_codebook_size: int = 256
    words: int | None = None
    """Tokens of a tokenizer that is learned from the titles of the data set; None: no word is read."""
    settings: tuple[str, ...] = ()
    """What differs from the config."""
    ties: tuple[Ties, ...] = TIES
    """Orders of ties that it is measured with."""
    published: tuple[Published, ...] = ()


DATASETS = {
    "beauty": DataSet(
        "Amazon Beauty (2014, 5-core)",
        "amazon14-beauty",
        "22,363 users, 12,101 items",
        published_ids=PublishedIds("semantic_ids/letter_rqvae_4x256.json", key_offset=1),
    ),
    "sports": DataSet(
        "Amazon Sports (2014, 5-core)",
        "amazon14-sports",
        "35,598 users, 18,357 items",
        methods=ELSEWHERE_WITH_TEXT,
    ),
    "movielens": DataSet("MovieLens 100K", "movielens-100k", "943 users, 1,682 items"),
    "yelp": DataSet(
        "Yelp (2019, 5-core)",
        "yelp-s3rec",
        "30,431 users, 20,033 items, no times and no texts",
        protocol="Leave-one-out, in the order of the file. Users come back to items, and 6.7 % of the test "
        "targets are in the history, so items of the history are kept, in validation too.",
        seen="kept",
        ties=("shuffled",),
        methods=ELSEWHERE,
        has_text=False,
    ),
    "instruments": DataSet(
        "Amazon Instruments (2014, 5-core, LETTER's preparation)",
        "amazon14-instruments",
        "24,772 users, 9,922 items, no times and no texts",
        protocol="Leave-one-out, in the order of the file; items of the history excluded.",
        ties=("shuffled",),
        methods=ELSEWHERE,
        has_text=False,
        published_ids=PublishedIds("Instruments.index.json"),
    ),
    "industrial": DataSet(
        "Amazon Industrial (2018, 5-core, MiniOneRec's preparation)",
        "minionerec-industrial",
        "3,285 users, 3,686 items, no times",
        prepare={"allow": ["cold-items", "short-users"]},
        protocol="The source divided the events of all users by time, and of a user's events in a period the "
        "first is predicted. Only users of its validation and test are there, so a model knows less than the "
        "source's own. As there, items of the history are kept.",
        seen="kept",
        ties=("shuffled",),
        methods=ELSEWHERE_WITH_TEXT,
        published_ids=PublishedIds("Industrial_and_Scientific.index.json"),
        rewritten=divided_industrial,
    ),
}
_BY_TIME = {"split": "time", "targets": "random", "clean": True}
_BY_TIME_IN_WORDS = (
    "Split by time: nobody's events of the last fifth of all events are trained on, unless learning goes on. "
    "One random event of each user in the first half of it validates, one in the second half is the test, if "
    "anything is before it"
)
for _name in ("beauty", "sports", "movielens"):
    DATASETS[f"{_name}-time"] = replace(
        DATASETS[_name],
        title=f"{DATASETS[_name].title}, split by time",
        prepare=_BY_TIME,
        protocol=f"{_BY_TIME_IN_WORDS}; items of the history excluded.",
        ties=("shuffled",),
        methods=ELSEWHERE_WITH_TEXT,
        published_ids=None,
    )
DATASETS["deskdrop-time"] = DataSet(
    "CI&T Deskdrop, split by time",
    "deskdrop",
    "1,895 users, 2,987 items, no texts",
    prepare=_BY_TIME,
    protocol=f"{_BY_TIME_IN_WORDS}. Events of all five behaviors; users come back to items (a like follows a "
    "view): 22.7 % of the test targets are in the history, 20.1 % are its newest item. So items of the "
    "history are kept, in validation too, and repeating the newest item finds more than all models here. 92 %"
    " of the targets have no training event: vectors of ids say nothing of them, and codes can repeat them.",
    seen="kept",
    ties=("shuffled",),
    methods=ELSEWHERE,
    has_text=False,
)
_TIGER_TABLE = "TIGER, arXiv:2305.05065, table 1"
_GENREC = "github.com/phonism/genrec"
METHODS = {
    "sasrec-bce": Method(
        "SASRec, BCE with one negative",
        "beauty-sasrec-bce",
        published=(
            Published("beauty", 0.0605, _TIGER_TABLE),
            Published("sports", 0.0350, _TIGER_TABLE),
        ),
    ),
    "sasrec-stored": Method(
        "SASRec, full softmax, ties as stored", "beauty-sasrec", settings=("data.redraw_ties=false",)
    ),
    "sasrec": Method(
        "SASRec, full softmax, ties reshuffled in training",
        "beauty-sasrec",
    ),
    "sasrec-content": Method("SASRec of ids, words and attributes, full softmax", "beauty-sasrec-content"),
    "sasrec-cosine": Method(
        "SASRec, full softmax, by the schedule of the row with words",
        "beauty-sasrec-content",
        settings=("model.content=null",),
    ),
    "sasrec-servers": Method(
        "SASRec, item rows on parameter servers, sampled softmax",
        "beauty-sasrec-sparse",
    ),
    "bsarec": Method(
        "BSARec, full softmax",
        "beauty-bsarec",
        published=(Published("beauty", 0.1008, "BSARec, arXiv:2312.10325"),),
    ),
    "hstu": Method(
        "HSTU, full softmax",
        "beauty-hstu",
        published=(
            Published("beauty", 0.0708, f"reproduction of {_GENREC}"),
            Published("sports", 0.0365, f"reproduction of {_GENREC}"),
        ),
    ),
    "gnn": Method("graph network (neighbors of events), sampled softmax", "beauty-gnn"),
    "gnn-full": Method(
        "graph network (neighbors of events), full softmax",
        "beauty-gnn",
        settings=("model.item_matrix=dense", "training.epochs=24"),
    ),
    "tiger": Method(
        "encoder-decoder over codes (TIGER)",
        "beauty-tiger",
        "both",
        published=(
            Published("beauty", 0.0648, _TIGER_TABLE),
            Published("beauty", 0.0721, f"reproduction of {_GENREC}"),
            Published("sports", 0.0400, _TIGER_TABLE),
            Published("sports", 0.0414, f"reproduction of {_GENREC}"),
        ),
    ),
    "tiger-stored": Method(
        "encoder-decoder over codes (TIGER), ties as stored",
        "beauty-tiger",
        "both",
        settings=("data.redraw_ties=false",),
        ties=("file order",),
    ),
    "lazy": Method("lazy decoder, IDs from interactions", "beauty-lazy", "interactions"),
    "lazy-text": Method("lazy decoder, IDs from text and interactions", "beauty-lazy", "both"),
    "light": Method(
        "light decoder over codes, rows of codes on parameter servers",
        "beauty-light",
        "both",
        max_codebook_size=512,
    ),
    "causal-lm": Method("causal language model over codes", "beauty-causal-lm", "both"),
    "causal-lm-words": Method(
        "causal language model over codes and titles",
        "beauty-item-language",
        "both",
        words=4_000,
        published=(
            Published("beauty", 0.0791, f"LC-Rec, a pretrained language model; reproduction of {_GENREC}"),
            Published("sports", 0.0422, f"LC-Rec, a pretrained language model; reproduction of {_GENREC}"),
        ),
    ),
    "generative": Method(
        "prefix decoder, IDs from text and interactions", "beauty-generative", "both", max_codebook_size=512
    ),
    "generative-servers": Method(
        "prefix decoder, prefix rows on parameter servers",
        "beauty-generative",
        "both",
        max_codebook_size=512,
        settings=("model.prefix_matrix=sparse", "sparse.tables.prefix={optimizer: {kind: adam, lr: 0.001}}"),
    ),
    "flat": Method(
        "one softmax over items with the prefix decoder's weights",
        "beauty-generative",
        "both",
        max_codebook_size=512,
        settings=("model.softmax=items",),
    ),
    "hybrid": Method(
        "sparse-dense hybrid: codes are generated, both softmaxes rank what was found",
        "beauty-generative",
        "both",
        max_codebook_size=512,
        settings=("model.softmax=hybrid",),
    ),
    "hybrid-servers": Method(
        "sparse-dense hybrid, prefix rows on parameter servers, sampled softmax over items",
        "beauty-generative",
        "both",
        max_codebook_size=512,
        settings=(
            "model.softmax=hybrid",
            "model.prefix_matrix=sparse",
            "model.num_negatives=8192",
            "sparse.tables.prefix={optimizer: {kind: adam, lr: 0.001}}",
        ),
    ),
    "ids-kmeans": Method(
        "prefix decoder, IDs from words and interactions by residual k-means",
        "beauty-generative",
        "interactions+content",
    ),
    "ids-rqvae": Method(
        "prefix decoder, IDs from words and interactions by RQ-VAE",
        "beauty-generative",
        "interactions+content",
        tokenizer="rq_vae",
    ),
    "ids-letter": Method(
        "prefix decoder, IDs from words by LETTER's RQ-VAE",
        "beauty-generative",
        "content",
        tokenizer="letter",
    ),
    "generative-published": Method("prefix decoder, published IDs", "beauty-generative", "published"),
    "generative-content": Method(
        "prefix decoder, words and attributes of prefixes",
        "beauty-generative",
        "interactions+content",
        max_codebook_size=512,
        settings=("model.content={}", "training.epochs=12"),
    ),
    "hybrid-content": Method(
        "sparse-dense hybrid, words and attributes of prefixes",
        "beauty-generative",
        "interactions+content",
        max_codebook_size=512,
        settings=("model.softmax=hybrid", "model.content={}", "training.epochs=12"),
    ),
    "codes-alone": Method(
        "prefix decoder without vectors of its own: codes alone",
        "beauty-codes",
        "interactions+content",
        max_codebook_size=512,
        settings=("model.content=null",),
    ),
    "codes": Method(
        "prefix decoder without vectors of its own: codes, words and attributes",
        "beauty-codes",
        "interactions+content",
        max_codebook_size=512,
    ),
}
METHODS["light-sasrec-ids"] = replace(
    METHODS["light"],
    title="light decoder over codes, IDs from the item vectors of SASRec of ids alone",
    vectors="sasrec",
)
for _name, _network in {
    "light": "light decoder over codes, rows of codes on parameter servers",
    "lazy": "lazy decoder",
    "codes": "prefix decoder without vectors of its own: codes, words and attributes",
    "generative": "prefix decoder",
    "hybrid": "sparse-dense hybrid",
    "hybrid-servers": "sparse-dense hybrid, prefix rows on parameter servers, sampled softmax over items",
}.items():
    METHODS[f"{_name}-sasrec"] = replace(
        METHODS[_name],
        title=f"{_network}, IDs from the item vectors of SASRec of ids, words and attributes",
        vectors="sasrec-content",
        published=(),
    )
