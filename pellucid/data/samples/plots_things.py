"""Stories about a thing that someone owns, loses, finds, spoils or gives away. Written for this project.

Hero, friend and object are named throughout. Any other fact is said in one step only and never recalled, so that a
small model can get a whole story right: what it has to remember, it is reminded of all the time.
"""

from pellucid.data.samples.grammar import Plot, question, step
from pellucid.data.samples.words import COLOR, HELPER, NUMBER, PLACE, SPOT, THING

OWNS = step(
    "Once upon a time, there was a (little|young|happy|cheerful) {girl} named {hero}. {hero} had {a_color} {object}.",
    "There was a (little|young|clever|friendly) {girl} named {hero}. {hero} had {a_color} {object}.",
    "There once was a {girl} called {hero} who (loved|treasured|adored) {his} {color} {object}.",
    "A {girl} named {hero} owned {a_color} {object} and (played with it every day|was very proud of it|loved it).",
    "Of all (the things in the house|the nice things), {hero} liked {his} {color} {object} best.",
)
ASK_COLOR = question(
    "(What color was the {object}?|Which color did the {object} have?)",
    "(The {object} was {color}.|It was {color}.)",
)
CONFIRM_COLOR = question("Was the {object} {color}?", "Yes, the {object} was {color}.")
DENY_COLOR = question("Was the {object} {other_color}?", "No, the {object} was {color}.")
ASK_HERO = question("Who is the story about?", "(The story is about {hero}.|It is about a {girl} named {hero}.)")

_GOES = step(
    "(One day|One morning|One afternoon), {hero} took the {object} to {place}.",
    "(One sunny day|On a windy day), {hero} went to {place}, and the {object} came along.",
    "One (warm|windy|cloudy|bright) day, {hero} was {at_place} with the {object}.",
)
_LOSES = step(
    "{hero} (ran|jumped|played|danced) for a long time. Then the {object} was gone.",
    "There was so much to see that {hero} forgot the {object} and lost it.",
    "{hero} put the {object} down to (chase a butterfly|pick some flowers|climb a tree). Then it was missing.",
    '"Oh no! Where is my {object}?" {hero} (cried|shouted) after a while.',
)
_FRIEND_COMES = step(
    '{friend} came by. "Why are you (sad|crying), {hero}?" {friend} asked.',
    "Just then, {hero} met a {f_girl} named {friend} and told {f_him} about the {object}.",
    '"Can I help you, {hero}?" asked {friend}, who was {his} (best|good|oldest) friend.',
    '"My {object} is (gone|lost)," {hero} (said|sobbed) to {his} friend {friend}.',
)
_HELPS = step(
    '"(Do not worry|Do not cry|Cheer up), {hero}," said {friend}. "We will look for the {object}."',
    "{friend} took {hero} by the hand, and they (searched|looked|hunted) together.",
    '"Four eyes see more than two," said {friend} to {hero}, and they (set off|began to search).',
    "{friend} looked for the {object} on the left, and {hero} looked on the right.",
)
_LOST = (OWNS, _GOES, _LOSES, _FRIEND_COMES, _HELPS)
_LOST_QUESTIONS = (
    ASK_COLOR,
    CONFIRM_COLOR,
    DENY_COLOR,
    ASK_HERO,
    question("(What did {hero} lose?|What was lost?)", "({hero} lost {his} {object}.|{He} lost {a_color} {object}.)"),
    question("Where did {hero} lose the {object}?", "({He} lost it {at_place}.|{hero} lost it {at_place}.)"),
    question("Who helped {hero}?", "({friend} helped {him}.|{hero} was helped by {friend}.)"),
    question("Did {hero} lose {a_other_object}?", "No, {hero} lost {a_object}."),
)

LOST_AND_FOUND = Plot(
    "lost and found",
    THING,
    (COLOR, PLACE, SPOT),
    (
        *_LOST,
        step(
            '(Soon|At last), {friend} found the {object} {spot}. "Here it is, {hero}!"',
            'Something was lying {spot}. "Look, {hero}!" said {friend}. It was the {object}.',
            "They found the {object} {spot}, and {friend} gave it to {hero}.",
        ),
        step(
            "{hero} was so (happy|glad) that {he} hugged {friend}.",
            '"Thank you, {friend}!" said {hero}, and {he} (laughed|smiled|jumped for joy).',
            "{hero} thanked {friend} and held the {object} tight.",
        ),
        step(
            "From then on, {hero} always looked after the {object}.",
            "{hero} and {friend} went home, and the {object} was never lost again.",
            "{hero} learned that it is good to have a friend like {friend}.",
            "After that day, {hero} and {friend} were (best|good) friends.",
        ),
    ),
    (
        *_LOST_QUESTIONS,
        question("Where was the {object}?", "(It was {spot}.|The {object} was {spot}.)"),
        question("How did the story end?", "{friend} found the {object}, and {hero} was happy."),
        question("Did they find the {object}?", "Yes, {friend} found it {spot}."),
    ),
)
LOST_AND_GONE = Plot(
    "lost and gone",
    THING,
    (COLOR, PLACE),
    (
        *_LOST,
        step(
            "They looked until it was dark, but the {object} was nowhere.",
            "But the {object} did not turn up, and (it got late|the sun went down|night fell).",
            "It was no use. Nobody ever saw the {object} again.",
        ),
        step(
            "The next day, {friend} came with a new {object} for {hero}.",
            '"I made you a new {object}, {hero}," said {friend} (in the morning|a day later).',
            'Later, {friend} gave {hero} another {object}. "You can have mine," {friend} said.',
        ),
        step(
            "{hero} learned that a friend is worth more than any {object}.",
            "{hero} loved the new {object} even more, because it came from {friend}.",
            '"You are a true friend, {friend}," said {hero}, who was not sad anymore.',
        ),
    ),
    (
        *_LOST_QUESTIONS,
        question("Did they find the {object}?", "No, they did not find it."),
        question("How did the story end?", "{friend} gave {hero} another {object}."),
    ),
)

MUD = Plot(
    "mud",
    THING,
    (COLOR, PLACE, HELPER),
    (
        step(
            "(One day|One morning|Last week), {hero} borrowed {a_color} {object} from {his} friend {friend}.",
            "There was a (lively|curious|busy) {girl} named {hero}. {hero} borrowed {a_color} {object} from {friend}.",
            'A {girl} named {hero} asked, "May I borrow your {color} {object}, {friend}?"',
        ),
        step(
            '"Please take good care of the {object}," said {friend}, and {hero} (promised|nodded).',
            '"You may have it until tomorrow," said {friend}. "Do not spoil the {object}, {hero}."',
            "{friend} said that the {object} must stay clean, and {hero} said yes.",
        ),
        step(
            "On the way to {place}, {hero} (slipped|tripped|stumbled), and the {object} fell into the mud.",
            "{hero} went to {place} and dropped the {object} into a (deep|big|dirty) puddle.",
            "But {at_place}, {hero} was not careful, and the {object} landed in the dirt.",
        ),
        step(
            '{His} {helper} said, "It is best to tell the truth, {hero}."',
            '{hero} went to {his} {helper}. "Be honest," said the {helper}.',
            '"What should I do?" {hero} asked {his} {helper}. "Tell the truth," {h_he} said.',
        ),
        step(
            'So {hero} went to {friend}. "I am sorry. I dropped your {object}," said {hero}.',
            "{hero} took a deep breath and told {friend} (everything|the truth|what had happened).",
            '"Oh, {friend}, I made a mistake," said {hero} and (showed|held out) the dirty {object}.',
        ),
        step(
            '{friend} was not angry. "Thank you for telling me, {hero}," said {friend}.',
            "{friend} looked at the {object} and then (smiled|laughed|grinned) at {hero}.",
            '"It is only mud," said {friend}. "We can wash it off, {hero}."',
        ),
        step(
            "They washed the {object} with soap until it was (clean|like new) again.",
            "{hero} and {friend} cleaned it, and soon the {object} was (bright|shiny).",
            "With a lot of water, {hero} and {friend} made the {object} clean.",
        ),
        step(
            "{hero} learned that telling the truth is always best.",
            "{hero} was glad that {he} had been honest with {friend}.",
            "And {friend} still lends things to {hero}, because {hero} tells the truth.",
        ),
    ),
    (
        ASK_COLOR,
        CONFIRM_COLOR,
        DENY_COLOR,
        question("Who owned the {object}?", "(It belonged to {friend}.|The {object} belonged to {friend}.)"),
        question("Who dropped the {object}?", "{hero} dropped it."),
        question("What did {hero} borrow?", "({He} borrowed {a_object}.|{hero} borrowed {a_color} {object}.)"),
        question("Who told {hero} to be honest?", "({His} {helper} did.|It was {his} {helper}.)"),
        question("Was {friend} angry?", "No, {friend} was not angry."),
        question("How did the story end?", "{hero} and {friend} made the {object} clean."),
    ),
)

GIFT = Plot(
    "gift",
    THING,
    (COLOR, HELPER, NUMBER),
    (
        step(
            "(One day|One morning|On the way home), {hero} saw {a_color} {object} in the window of a shop.",
            "There was {a_color} {object} in a shop. A {girl} named {hero} looked at it every day.",
            "A (kind|thoughtful|good) {girl} named {hero} went to the shop and saw {a_color} {object}.",
        ),
        step(
            '"That is just right for the birthday of {friend}," thought {hero}.',
            "{hero} wanted to buy the {object} for {friend}, whose birthday was coming.",
            '"My friend {friend} would love this {object}," {hero} (said|whispered).',
        ),
        step(
            "But the {object} cost {number} coins, and {hero} had only (one|two).",
            "The {object} cost {number} coins. {hero} did not have that much.",
            '"The {object} is {number} coins," said the shopkeeper. {hero} had no money.',
        ),
        step(
            '"Help me in the (kitchen|garden|house), {hero}," said {his} {helper}, "and I will pay you."',
            "So {hero} asked {his} {helper} for work, and there was plenty.",
            "{hero} had an idea and (began to work|went to work) for {his} {helper}.",
        ),
        step(
            "After a week of work, {hero} had enough coins and ran to buy the {object}.",
            "{hero} worked hard, got the coins and bought the {object} before (somebody else did|the shop closed).",
            '"Here are the coins," said {hero} in the shop, and the {object} was {his}.',
        ),
        step(
            "On the (birthday|big day), {friend} opened the present from {hero}. It was the {object}!",
            "{friend} (laughed|cheered|smiled) when {hero} came with the {object}.",
            '"For me?" asked {friend} and held the {object} up for all to see.',
        ),
        step(
            '"This is the best present of all," said {friend} and hugged {hero}.',
            '"Thank you, {hero}!" said {friend}. "I love the {object}."',
            "{friend} thanked {hero} again and again for the {object}.",
        ),
        step(
            "{hero} learned that giving makes you happy.",
            "{hero} was tired, but {he} had never been so happy.",
            "And {hero} knew that all the work had been worth it.",
        ),
    ),
    (
        ASK_COLOR,
        CONFIRM_COLOR,
        DENY_COLOR,
        question(
            "How many coins did the {object} cost?", "(It cost {number} coins.|The {object} cost {number} coins.)"
        ),
        question("Whose birthday was it?", "It was the birthday of {friend}."),
        question("What did {hero} buy?", "({hero} bought {a_object}.|{He} bought {a_color} {object}.)"),
        question("Who paid {hero} for the work?", "({His} {helper} did.|It was {his} {helper}.)"),
        question("Did {hero} keep the {object}?", "No, {hero} gave it to {friend}."),
        question("How did the story end?", "{friend} got the {object} and thanked {hero}."),
    ),
)

FINDER = Plot(
    "finder",
    THING,
    (COLOR, PLACE, SPOT, HELPER),
    (
        step(
            "(One day|One morning|On the way home), {hero} found {a_color} {object} {spot} and (kept it|took it home).",
            'A {girl} named {hero} saw something {spot}. "Oh, {a_color} {object}!" said {hero} and took it.',
            "There was {a_color} {object} {spot}. A {girl} named {hero} (picked it up|took it home|kept it).",
        ),
        step(
            "But at night, {hero} could not sleep. Somebody must miss the {object}.",
            "Then {hero} thought of the owner. Was somebody (sad|crying|looking for it) now?",
            "But {hero} did not feel right about the {object}.",
        ),
        step(
            '{hero} asked {his} {helper}. "Try to find the owner, {hero}," {h_he} said.',
            '"Whose {object} is it?" asked {his} {helper}. {hero} turned red.',
            "{His} {helper} told {hero} that lost things should go back to their owners.",
        ),
        step(
            "In the morning, {hero} went to {place} and met a {f_girl} named {friend}.",
            "The next day, {hero} was {at_place} and saw a (sad|worried) {f_girl} named {friend}.",
            "So {hero} walked to {place}. There sat {friend} with a sad face.",
        ),
        step(
            '"I have lost my {object}," said {friend} to {hero}.',
            '"Have you seen {a_object}, {hero}?" asked {friend}.',
            '"What are you looking for, {friend}?" asked {hero}. "My {object}," said {friend}.',
        ),
        step(
            '{hero} held up the {object}. "Is this yours, {friend}?"',
            "{hero} knew what to do and gave the {object} to {friend}.",
            '"Here is the {object}," said {hero} to {friend}. "I found it."',
        ),
        step(
            '{friend} (jumped|danced|shouted) for joy. "Thank you, {hero}!"',
            '"You are so (honest|kind), {hero}," said {friend} and hugged the {object}.',
            "{friend} was so glad that {f_he} gave {hero} (a flower|a sweet|a hug).",
        ),
        step(
            "That night, {hero} slept very well.",
            "{hero} did not have the {object} anymore, but {he} had a new friend.",
            "{hero} learned that being honest feels better than keeping things.",
            "And so {hero} and {friend} became (best|good) friends.",
        ),
    ),
    (
        ASK_COLOR,
        CONFIRM_COLOR,
        DENY_COLOR,
        question("What did {hero} find?", "({hero} found {a_object}.|{He} found {a_color} {object}.)"),
        question("Where did {hero} find the {object}?", "({He} found it {spot}.|It was {spot}.)"),
        question("Who owned the {object}?", "(It belonged to {friend}.|The {object} belonged to {friend}.)"),
        question("Where did {hero} meet {friend}?", "They met {at_place}."),
        question("Did {hero} find {a_other_object}?", "No, {hero} found {a_object}."),
        question("How did the story end?", "{hero} gave the {object} back to {friend}."),
    ),
)

ALL: tuple[Plot, ...] = (LOST_AND_FOUND, LOST_AND_GONE, MUD, GIFT, FINDER)
