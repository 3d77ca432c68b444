"""Writes the corpus: sentences made from frames and names, as spaCy's ``.spacy`` files of documents with entities.

    python -m examples.spacy_ner.corpus [directory] [--train 1200] [--dev 300]

The corpus is generated, so nothing has to be downloaded, and each run writes the same. A pipeline can't learn it by
heart: the test documents have other frames and other names than the training documents, some names stand for more than
one kind of thing (Jordan, Washington, May), and some sentences have capitals but no entity.
"""

from __future__ import annotations

import argparse
import random
import re
from dataclasses import dataclass
from pathlib import Path

import spacy
from spacy.tokens import DocBin

SEED = 0

_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The words of one part of the corpus; each field is a list, with ``/`` between its items."""

    given: str
    family: str
    places: str
    firms: str
    frames: tuple[str, ...]

    def draw(self, rng: random.Random, kind: str) -> str:
        """A name of this kind of entity."""
        return KINDS[kind](self, rng)

    def pick(self, rng: random.Random, field: str) -> str:
        """An item of a field."""
        return rng.choice(getattr(self, field).split("/"))


def _person(words: Words, rng: random.Random) -> str:
    given, family = words.pick(rng, "given"), words.pick(rng, "family")
    return rng.choice([*[f"{given} {family}"] * 4, f"{given[0]}. {family}", family])


def _org(words: Words, rng: random.Random) -> str:
    firm, place, family = words.pick(rng, "firms"), words.pick(rng, "places"), words.pick(rng, "family")
    forms = (
        firm,
        f"{firm} {family}",
        f"{firm} {rng.choice(['Inc.', 'Ltd', 'Group', 'Holdings', 'AG', 'Systems'])}",
        f"{family} & Sons",
        f"Bank of {place}",
        f"University of {place}",
        f"{place} Airlines",
    )
    return rng.choice(forms)


def _gpe(words: Words, rng: random.Random) -> str:
    return words.pick(rng, "places")


def _date(_: Words, rng: random.Random) -> str:
    month = rng.choice(["January", "March", "April", "May", "June", "August", "October", "December"])
    day, year = rng.randint(1, 28), rng.randint(1950, 2026)
    weekday = rng.choice(["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"])
    return rng.choice(
        [weekday, f"{month} {year}", f"{day} {month} {year}", f"{month} {day}", f"last {weekday}", str(year)]
    )


def _money(_: Words, rng: random.Random) -> str:
    sign, number = rng.choice("$€£"), rng.randint(2, 980)
    return rng.choice(
        [f"{sign}{number} million", f"{sign}{number / 10:.1f} billion", f"{number} euros", f"{sign}{number},000"]
    )


KINDS = {"PERSON": _person, "ORG": _org, "GPE": _gpe, "DATE": _date, "MONEY": _money}

TRAIN = Words(
    given="Anna/Ben/Carla/David/Elena/Felix/Grace/Hugo/Irene/Jordan/Karl/Lucy/Marta/Nikhil/Olga/Paul/Rosa/Samir/Tara/Umar"
    "/Vera/Wei/Yusuf/Zoe/April/Theresa",
    family="Abbott/Bauer/Castillo/Dubois/Eriksen/Foster/Gupta/Hansen/Ivanov/Jackson/Kowalski/Lehmann/May/Nakamura/Okafor"
    "/Petrov/Quinn/Rossi/Schmidt/Tanaka/Washington/Young",
    places="Argentina/Berlin/Canada/Denmark/Egypt/Finland/Geneva/Hanoi/India/Jordan/Kenya/Lisbon/Mexico/New York/Oslo"
    "/Paris/Rome/San Francisco/Tokyo/Uganda/Vienna/Washington/the United Kingdom",
    firms="Acme/Brightwater/Cobalt/Deltaform/Evergreen/Fairline/Globex/Hexagon/Initech/Juniper/Keystone/Lumina/Meridian"
    "/Northwind/Orchard/Pinnacle",
    frames=(
        "{PERSON} joined {ORG} in {DATE} as head of research.",
        "{ORG} said on {DATE} that it would buy {ORG} for {MONEY}.",
        "Shares of {ORG} fell sharply after {PERSON} resigned.",
        "The government of {GPE} lent {MONEY} to {GPE}.",
        "{PERSON}, who was born in {GPE}, leads the talks with {ORG}.",
        "Nobody in {GPE} expected {PERSON} to win.",
        "In {DATE}, {ORG} opened an office in {GPE}.",
        '"We are not for sale," {PERSON} told reporters in {GPE}.',
        "{ORG} reported a profit of {MONEY} for the year.",
        "The court ordered {PERSON} to pay {MONEY} by {DATE}.",
        "Flights from {GPE} to {GPE} were cancelled on {DATE}.",
        "According to {PERSON} of {ORG}, prices may rise again.",
        "A spokeswoman for {ORG} declined to comment.",
        "{PERSON} and {PERSON} met in {GPE} for the first time.",
        "Talks between {GPE} and {GPE} ended without a result.",
        "{ORG} may close its plant near {GPE} this summer.",
        "The Minister of Finance has not answered yet.",
        "However, most analysts expect little change.",
        "Rain is likely in the north, and wind along the coast.",
        "The Board of Directors will meet again next week.",
        "{GPE} raised {MONEY} at an auction of bonds on {DATE}.",
        "Police in {GPE} arrested {PERSON} on {DATE}.",
        "{PERSON} sold the painting to {ORG} for {MONEY}.",
        "The new bridge in {GPE} cost {MONEY}.",
        "Before {DATE}, {PERSON} worked for {ORG} in {GPE}.",
        "Investors in {ORG} were told to wait until {DATE}.",
        "{PERSON} teaches history at {ORG}.",
        "{ORG} and {ORG} agreed to share their data.",
        "{PERSON} was born in {DATE} and grew up in {GPE}.",
        "A stake in {ORG} was sold for {MONEY}.",
        "{ORG} was founded in {GPE} by {PERSON}.",
        "The parliament of {GPE} voted on {DATE}.",
        "Exports from {GPE} have doubled since {DATE}.",
        "Sales at {ORG} rose, while {ORG} lost customers.",
        "{PERSON} travelled to {GPE} with a large team.",
        '"They never asked," said {PERSON}.',
        "For years {PERSON} has praised {ORG}.",
        "Trade unions in {GPE} want {MONEY} more.",
        "{ORG} hired {PERSON} on {DATE}.",
        "{GPE} and {GPE} will sign the contract on {DATE}.",
        "Critics doubt that it was a good year.",
        "The Department of Health published the list.",
        "{PERSON} wrote that {ORG} had offered {MONEY}.",
        "Heavy snow closed the airport in {GPE}.",
        "{PERSON} was elected in {DATE} and left in {DATE}.",
        "Customers of {ORG} in {GPE} complained for weeks.",
        "A team led by {PERSON} at {ORG} found the error.",
        "{GPE} borrowed {MONEY} from {ORG}.",
    ),
)
DEV = Words(
    given="Adele/Boris/Chiara/Dmitri/Esther/Fatima/Georg/Hannah/Ivan/Julia/Kenji/Leila/Mario/Nora/Oscar/Priya",
    family="Almeida/Brandt/Chen/Diaz/Ekström/Fischer/Garcia/Haddad/Ito/Jensen/Kaya/Lopez/Mueller/Novak/Olsen/Park",
    places="Austria/Bogota/Chile/Dublin/Estonia/France/Greece/Havana/Iceland/Jakarta/Kyoto/London/Madrid/Norway/Peru"
    "/South Korea",
    firms="Arcadia/Bluestone/Crestview/Dynatek/Everline/Foxglove/Granite/Halcyon/Ironbridge/Kestrel/Lakeside/Monarch",
    frames=(
        "{PERSON} left {ORG} in {DATE} to found a company in {GPE}.",
        "{ORG} has offered {MONEY} for a stake in {ORG}.",
        "Elections in {GPE} were held on {DATE}.",
        "{PERSON} flew from {GPE} to {GPE} with a small team.",
        "The Ministry of Health in {GPE} will spend {MONEY}.",
        "Since {DATE}, {ORG} has lost {MONEY}.",
        '"It was a long night," said {PERSON} on {DATE}.',
        "The Committee on Trade has yet to vote.",
        "Profits at {ORG} rose, and {PERSON} was praised for it.",
        "{PERSON} was hired by {ORG} after a year in {GPE}.",
        "Critics say that the plan will never work.",
        "{GPE} and {GPE} signed the treaty in {DATE}.",
    ),
)


def make(words: Words, count: int, seed: int) -> DocBin:
    """Makes documents of one to three sentences.

    Args:
        words: Their frames and names.
        count: How many documents.
        seed: The same seed gives the same documents.
    """
    rng = random.Random(seed)
    nlp = spacy.blank("en")
    docs = DocBin()
    for _ in range(count):
        text, spans = "", []
        for _ in range(rng.randint(1, 3)):
            text += " " * bool(text)
            at = 0
            frame = rng.choice(words.frames)
            for field in _FIELD.finditer(frame):
                text += frame[at : field.start()]
                name = words.draw(rng, field[1])
                name = name if text.strip() or not name.startswith("the ") else name[4:]
                spans.append((len(text), len(text) + len(name), field[1]))
                text += name
                at = field.end()
            text += frame[at:]
        doc = nlp.make_doc(text)
        entities = [doc.char_span(start, stop, label, alignment_mode="expand") for start, stop, label in spans]
        doc.set_ents([entity for entity in entities if entity is not None])
        docs.add(doc)
    return docs


def write(directory: Path, train: int = 1200, dev: int = 300) -> tuple[Path, Path]:
    """Writes ``train.spacy`` and ``dev.spacy``.

    Args:
        directory: Where; it is created if it does not exist.
        train: The number of training documents.
        dev: The number of test documents.

    Returns:
        The two files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = directory / "train.spacy", directory / "dev.spacy"
    make(TRAIN, train, SEED).to_disk(paths[0])
    make(DEV, dev, SEED + 1).to_disk(paths[1])
    return paths


def main(arguments: list[str] | None = None) -> None:
    """Reads the command line, and writes the corpus."""
    parser = argparse.ArgumentParser(description="Writes a generated corpus with named entities.")
    parser.add_argument("directory", type=Path, nargs="?", default=Path(__file__).parent / "corpus")
    parser.add_argument("--train", type=int, default=1200, help="documents to learn from (default 1200)")
    parser.add_argument("--dev", type=int, default=300, help="documents to be tested with (default 300)")
    options = parser.parse_args(arguments)
    for path in write(options.directory, options.train, options.dev):
        print(f"wrote {path} ({path.stat().st_size / 1e3:.0f} kB)")


if __name__ == "__main__":
    main()
