"""The words of the built-in stories, and every form in which a template may use them.

A *fact* is one latent choice of a story (who the hero is, which object, where). A `Lexicon` lists the values a fact can
take and spells each of them for every slot that depends on it: the fact ``hero`` with the value ``Tom`` fills the slots
``{hero}``, ``{he}``, ``{his}``, ``{girl}`` and so on, so pronouns and articles cannot disagree with what they refer to.
"""

from dataclasses import dataclass
from functools import cached_property


def _words(line: str) -> list[str]:
    return line.split()


GIRLS = _words(
    "Lily Mia Anna Emma Zoe Ella Lucy Sara Nora Ruby Ivy Amy Eva Lola Maya Leah Kate Jane Nina Rosa Clara Alice Molly "
    "Sophie Julia Laura Hannah Emily Chloe Ellen Fiona Gina Helen Irene Jenny Karen Linda Maria Nancy Paula Polly "
    "Rachel Sally Tina Wendy Bella Betty Carla Celia Cora Dora Edith Elsa Erin Esther Flora Freya Gemma Greta Heidi "
    "Hilda Holly Ida Iris Isla Jill Joan Josie Judy Kira Lara Lena Lisa Luna Mabel Martha Mary Megan Mila Mina Naomi "
    "Nelly Olga Pam Penny Petra Pippa Priya Rita Sadie Sandra Selma Sonia Stella Susan Tara Tessa Thea Vera Yara Yuki "
    "Zara Aisha Amina Leila"
)
BOYS = _words(
    "Tom Tim Ben Sam Max Leo Jack Finn Noah Luke Adam Alan Andy Anton Arthur Axel Barry Boris Brian Bruno Carl Cody "
    "Colin Dan David Dennis Derek Diego Dylan Eddie Edgar Eli Emil Eric Ethan Evan Felix Frank Fred Gary George Glen "
    "Gus Hank Harry Hector Henry Hugo Ian Isaac Ivan Jake James Jason Jasper Jeff Jim Joe Joel John Jonas Josh Juan "
    "Karl Keith Ken Kevin Kurt Kyle Larry Liam Louis Marco Mario Martin Matt Miles Milo Mike Nate Neil Nick Nico "
    "Oliver Omar Oscar Otto Owen Pablo Paul Peter Ralph Ravi Rex Roger Rory Roy Ryan Scott Simon Stan Steve Ted Theo "
    "Toby Tony Victor Walter Amir Kenji"
)
THINGS = _words(
    "ball kite drum doll cup hat scarf book bell bag basket blanket boat bottle bow bowl bracelet brush bucket "
    "button candle cap card chain clock coat comb crayon crown cushion dress envelope fan feather flag flute "
    "fork glove guitar hammer harp helmet hook hoop horn jacket jar jewel jug kettle key ladder lamp lantern leash "
    "lid magnet map marble mask medal mirror mitten mug napkin necklace needle net notebook oar ornament paddle "
    "paintbrush pan pebble pen pencil pillow pin pipe plate postcard pot pouch puppet purse puzzle quilt racket "
    "rattle ribbon ring robot rocket rope ruler sack sandal saucer scooter shawl shell shirt shoe shovel slipper sled "
    "sock spade spinner sponge spoon stamp sticker stick stone stool suitcase sweater sword tambourine teapot "
    "telescope ticket tie top torch towel toy tray trumpet truck umbrella vase vest violin wagon wallet wand watch "
    "whistle wheel yo-yo zipper train tent plane apron armband easel album arrow anchor"
)
FOODS = _words(
    "apple pear peach plum orange banana melon cookie cake pie bun roll muffin pancake waffle donut sandwich pizza "
    "burger taco bagel biscuit tart cupcake brownie pretzel sausage carrot potato tomato apricot mango fig kiwi "
    "coconut pineapple pumpkin omelet egg avocado turnip pepper cracker dumpling mushroom meatball onion lemon "
    "cucumber strawberry croissant"
)
COLORS = _words("red blue green yellow orange purple pink brown black white silver golden gray")
QUALITIES = _words("big small fresh tasty nice lovely huge fine tiny special")
PLACES = {  # the place: how one is there
    "park": "in",
    "forest": "in",
    "garden": "in",
    "meadow": "in",
    "orchard": "in",
    "valley": "in",
    "beach": "at",
    "lake": "at",
    "river": "at",
    "market": "at",
    "pond": "at",
    "harbor": "at",
    "school": "at",
    "farm": "on",
    "hill": "on",
    "playground": "on",
    "field": "in",
    "village": "in",
}
HELPERS = {
    "mom": "she",
    "dad": "he",
    "grandma": "she",
    "grandpa": "he",
    "aunt": "she",
    "uncle": "he",
    "teacher": "she",
    "neighbor": "he",
}
ANIMALS = _words("puppy kitten bird duck rabbit squirrel hedgehog mouse goat lamb pony fox owl otter turtle donkey")
SPOTS = [
    "under a bench",
    "behind a rock",
    "under a bush",
    "in the tall grass",
    "next to a tree",
    "near the gate",
    "behind the fence",
    "under some leaves",
    "by the path",
    "behind a wall",
]
FEARS = [
    "the dark",
    "the thunder",
    "big dogs",
    "deep water",
    "the wind",
    "spiders",
    "monsters",
    "loud noises",
    "high places",
    "bees",
]
NUMBERS = _words("three four five six seven eight nine ten eleven twelve")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

PRONOUNS = {
    "he": {"he": "he", "He": "He", "him": "him", "his": "his", "His": "His"},
    "she": {"he": "she", "He": "She", "him": "her", "his": "her", "His": "Her"},
}


def article(word: str) -> str:
    """``word`` after ``a`` or ``an``; no word of these lists sounds otherwise than its first letter says."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


@dataclass(frozen=True, eq=False)
class Lexicon:
    """The values of one fact and their spelling in each slot: ``forms[value][slot]``."""

    fact: str
    forms: dict[str, dict[str, str]]

    @cached_property
    def values(self) -> list[str]:
        """The values in their fixed order, which a seed's choices depend on."""
        return list(self.forms)

    @cached_property
    def slots(self) -> frozenset[str]:
        """The slots that this fact fills."""
        return frozenset(next(iter(self.forms.values())))

    @cached_property
    def readings(self) -> dict[str, dict[str, list[str]]]:
        """``readings[slot][spelling]``: the values that are spelled so there."""
        table: dict[str, dict[str, list[str]]] = {slot: {} for slot in self.slots}
        for value, forms in self.forms.items():
            for slot, spelling in forms.items():
                table[slot].setdefault(spelling, []).append(value)
        return table

    @cached_property
    def lengths(self) -> dict[str, list[int]]:
        """The lengths of the spellings of each slot, longest first."""
        return {slot: sorted({len(s) for s in spellings}, reverse=True) for slot, spellings in self.readings.items()}


def _people(fact: str, prefix: str) -> Lexicon:
    forms = {}
    for names, pronoun, noun in ((GIRLS, "she", "girl"), (BOYS, "he", "boy")):
        for name in names:
            forms[name] = {fact: name, f"{prefix}girl": noun}
            forms[name] |= {prefix + slot: spelling for slot, spelling in PRONOUNS[pronoun].items()}
    return Lexicon(fact, forms)


def _nouns(fact: str, words: list[str]) -> Lexicon:
    return Lexicon(fact, {word: {fact: word, f"a_{fact}": article(word)} for word in words})


def _plain(fact: str, words: list[str]) -> Lexicon:
    return Lexicon(fact, {word: {fact: word} for word in words})


HERO = _people("hero", "")
FRIEND = _people("friend", "f_")
THING = _nouns("object", THINGS)
FOOD = _nouns("object", FOODS)
COLOR = Lexicon("color", {c: {"color": c, "a_color": article(c), "A_color": article(c).capitalize()} for c in COLORS})
QUALITY = _nouns("quality", QUALITIES)
ANIMAL = _nouns("animal", ANIMALS)
SPOT = _plain("spot", SPOTS)
FEAR = _plain("fear", FEARS)
NUMBER = Lexicon("number", {n: {"number": n, "Number": n.capitalize()} for n in NUMBERS})
DAY = _plain("day", DAYS)
PLACE = Lexicon("place", {p: {"place": f"the {p}", "at_place": f"{prep} the {p}"} for p, prep in PLACES.items()})
HELPER = Lexicon(
    "helper",
    {h: {"helper": h} | {f"h_{slot}": spelling for slot, spelling in PRONOUNS[p].items()} for h, p in HELPERS.items()},
)
