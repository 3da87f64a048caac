"""Stories about a thing that someone owns, loses, finds, spoils or gives away. Written for this project."""

from pellucid.data.samples.grammar import Plot, question, step
from pellucid.data.samples.words import COLOR, HELPER, NUMBER, PLACE, SPOT, THING

OWNS = step(
    "Once upon a time, there was a (little|young|happy|cheerful) {girl} named {hero}. {He} had {a_color} {object}.",
    "There was a (little|young|clever|friendly) {girl} named {hero}. {His} (dearest|favorite) thing was {a_color} {object}.",
    "There once was a {girl} called {hero} who (loved|treasured|adored) {his} {color} {object}.",
    "A {girl} named {hero} owned {a_color} {object}. {He} (played with it every day|was very proud of it|loved it).",
    "Of all (the things in the house|{his} things), {hero} liked {his} {color} {object} best.",
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
    "(One day|One sunny day|On a windy day), {he} went to {place}, and the {object} came along.",
    "{He} took it everywhere, and (one day|once) {he} took it to {place}.",
    "One (warm|windy|cloudy|bright) day, {hero} was {at_place} with the {object}.",
)
_LOSES = step(
    "{hero} (ran|jumped|played|danced) until {he} was tired. Then {he} saw that the {object} was gone.",
    "There was so much to see that {hero} forgot the {object}. When {he} looked for it, it was gone.",
    "{He} put it down to (chase a butterfly|pick some flowers|climb a tree|watch the clouds). "
    "When {he} came back, the {object} was missing.",
    'After a while, {hero} looked into {his} bag. "Oh no! Where is my {object}?" {he} (cried|shouted).',
)
_SEARCHES = step(
    "{hero} looked (here and there|high and low|all around) but could not find it. {He} began to (cry|weep).",
    "{He} searched (for an hour|for a long time|again and again), but there was no {object}.",
    "{hero} walked back and forth with (tears in {his} eyes|a heavy heart|a sad face).",
    "{He} sat down on the ground and felt very (sad|unhappy|lonely).",
)
_FRIEND_COMES = step(
    '{friend}, a {f_girl} from (school|next door), saw {him} and asked, "Why are you (sad|crying), {hero}?"',
    'Then {his} friend {friend} came by. "What is wrong, {hero}?" {f_he} asked.',
    "Just then, {hero} met a {f_girl} named {friend}. {friend} asked what had happened.",
    '"Can I help you, {hero}?" asked {friend}, who was {his} (best|good|oldest) friend.',
)
_TELLS = step(
    '"I lost my {color} {object}," said {hero}.',
    "{hero} told {friend} all about the lost {object}.",
    '"My {object} is (gone|lost)," {hero} (answered|sobbed|replied). "It is {color}."',
)
_HELPS = step(
    '"(Do not worry|Do not cry|Cheer up)," said {friend}. "We will look for it together."',
    "{friend} took {hero} by the hand, and they (searched|looked|hunted) together.",
    '"Four eyes see more than two," said {friend}, and they (set off|began to search).',
    "{friend} wanted to help. {f_He} looked on the left and {hero} looked on the right.",
)
_LOST = (OWNS, _GOES, _LOSES, _SEARCHES, _FRIEND_COMES, _TELLS, _HELPS)
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
            '(Soon|At last), {friend} found the {object} {spot}. "Here it is!" {f_he} (called|shouted).',
            'Something {color} was lying {spot}. "Look, {hero}!" said {friend}. It was the {object}.',
            "They found the {object} {spot}, and {friend} gave it to {hero}.",
        ),
        step(
            "{hero} was so (happy|glad) that {he} hugged {friend}.",
            '"Thank you, {friend}!" said {hero}, and {he} (laughed|smiled|jumped for joy).',
            "{hero} thanked {friend} and held the {object} tight.",
        ),
        step(
            "From then on, {hero} always looked after the {object}.",
            "{hero} and {friend} went home together, and the {object} was never lost again.",
            "{hero} learned that it is good to have a friend who helps.",
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
            "The next day, {friend} came with a present. In it was a new {object} for {hero}.",
            'In the morning, {friend} (knocked|rang). "I made you a new {object}," {f_he} said to {hero}.',
            'Later, {friend} gave {hero} {f_his} own {object}. "You can have mine," {f_he} said.',
        ),
        step(
            "{hero} learned that a friend is worth more than any {object}.",
            "{hero} loved the new {object} even more, because it came from {friend}.",
            '"You are a true friend, {friend}," said {hero}, and {he} was not sad anymore.',
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
            "There was a (lively|curious|busy) {girl} named {hero}. {He} borrowed {a_color} {object} from {friend}.",
            'A {girl} named {hero} asked, "May I borrow your {color} {object}, {friend}?"',
        ),
        step(
            '"Please take good care of it," said {friend}, and {hero} (promised|nodded).',
            '"You may have it until tomorrow," said {friend}. "Do not spoil it, {hero}."',
            "{friend} said that the {object} must stay clean, and {hero} gave {his} word.",
        ),
        step(
            "On the way to {place}, {hero} (slipped|tripped|stumbled), and the {object} fell into the mud.",
            "{hero} took it to {place}. There {he} (slipped|tripped|stumbled) and dropped the {object} into a puddle.",
            "But {at_place}, {hero} was not careful, and the {object} landed in the dirt.",
        ),
        step(
            "It was dirty all over. {hero} wanted to hide the {object} (under the bed|in a box|in the shed).",
            '"Now {friend} will be (angry|mad) with me," thought {hero}. {He} was (scared|afraid).',
            "{hero} felt (terrible|awful). {He} did not know what to say to {friend}.",
        ),
        step(
            '{His} {helper} saw it and said, "It is best to tell the truth, {hero}."',
            '{hero} went to {his} {helper}. "Be honest," said the {helper}.',
            '"What should I do?" {he} asked {his} {helper}. "Tell the truth," {h_he} said.',
        ),
        step(
            'So {hero} went to {friend}. "I am sorry. I dropped your {object}," {he} said.',
            "{hero} took a deep breath and told {friend} (everything|the truth|what had happened).",
            '"Oh, {friend}, I made a mistake," said {hero}, and {he} (showed|held out) the dirty {object}.',
        ),
        step(
            '{friend} was not angry. "Thank you for telling me, {hero}," {f_he} said.',
            "{friend} looked at the {object} for a moment. Then {f_he} (smiled|laughed|grinned) at {hero}.",
            '"It is only mud," said {friend}. "We can wash it off, {hero}."',
        ),
        step(
            "They washed the {object} with soap until it was {color} again.",
            "{hero} and {friend} cleaned it together, and soon the {object} was (bright|shiny) and {color}.",
            "With water and a brush, {hero} and {friend} made the {object} clean.",
        ),
        step(
            "{hero} learned that telling the truth is always best.",
            "{hero} was glad that {he} had been honest.",
            "From that day on, {hero} was very careful with the things of other people.",
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

_BIRTHDAY = step(
    "On the (birthday|big day), {friend} opened the present and (laughed|cheered|smiled). It was the {object}!",
    "{friend} could not believe {f_his} eyes when {f_he} saw the {object}.",
    '"For me?" asked {friend}. {f_He} held the {object} up for all to see.',
)
GIFT = Plot(
    "gift",
    THING,
    (COLOR, HELPER, NUMBER),
    (
        step(
            "(One day|One morning|In the street), {hero} saw {a_color} {object} in the window of a shop.",
            "There was {a_color} {object} in the shop on the corner. A {girl} named {hero} looked at it every day.",
            "A (kind|thoughtful|good) {girl} named {hero} went to the shop and saw {a_color} {object}.",
        ),
        step(
            '"That is just right for the birthday of {friend}," thought {hero}.',
            "{He} wanted to buy it for {friend}, whose birthday was coming.",
            '"My friend {friend} would love this {object}," {he} (said|whispered).',
        ),
        step(
            "But the {object} cost {number} coins, and {hero} had only (one|two).",
            "It cost {number} coins. {hero} did not have that much.",
            '"That is {number} coins," said the shopkeeper. {hero} looked into {his} empty purse.',
        ),
        step(
            '"You can help me in the (kitchen|garden|house)," said {his} {helper}, "and I will pay you."',
            "So {he} asked {his} {helper} for work, and there was plenty.",
            "{hero} had an idea. {He} would work for {his} {helper}.",
        ),
        step(
            "All week, {hero} (swept the floor|washed the dishes|pulled weeds|folded the laundry).",
            "{He} (carried wood|fed the hens|raked leaves|cleaned the windows) every day after school.",
            "It was hard work, but {hero} (never gave up|did not stop|did not complain).",
        ),
        step(
            'On Saturday, the {helper} counted {number} coins into {his} hand. "Well done, {hero}!"',
            "At last, {hero} had {number} coins, and {he} thanked {his} {helper}.",
            "The {helper} was (proud|pleased) and gave {him} {number} shiny coins.",
        ),
        step(
            "{hero} ran to the shop, bought the {object} and wrapped it in (paper|blue paper|a cloth).",
            "{He} hurried to buy the {object} before (somebody else did|the shop closed).",
            '"Here are {number} coins," said {hero}, and the {object} was {his}.',
        ),
        _BIRTHDAY,
        step(
            '"This is the best present of all," said {friend}, and {f_he} hugged {hero}.',
            '"Thank you, {hero}!" {f_he} said. "It is {color}, and I love {color} things."',
            "{friend} thanked {hero} again and again.",
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
            "(One day|One morning|On the way home), {hero} found {a_color} {object} {spot}.",
            'A {girl} named {hero} saw something {spot}. "Oh, {a_color} {object}!" {he} said.',
            "There was {a_color} {object} {spot}. A {girl} named {hero} picked it up.",
        ),
        step(
            '"(Finders keepers|Now it is mine|How lucky I am)," thought {hero}. {He} put the {object} into {his} bag.',
            "{He} wanted to keep the {object} for ever.",
            "It was the (finest|nicest|prettiest) {object} that {hero} had ever seen.",
        ),
        step(
            "But at night, {hero} could not sleep. Somebody must miss the {object}.",
            "Then {he} thought of the owner. Was somebody (sad|crying|looking for it) now?",
            "{hero} took it home, but {he} did not feel right about it.",
        ),
        step(
            '{He} asked {his} {helper}. "Try to find the owner, {hero}," {h_he} said.',
            '"Whose {object} is it?" asked {his} {helper}. {hero} turned red and said nothing.',
            "{His} {helper} said that lost things should go back to their owners.",
        ),
        step(
            "In the morning, {hero} went to {place} and met a {f_girl} named {friend}, who was looking for something.",
            "The next day, {hero} was {at_place} and saw a (sad|worried) {f_girl}. {f_His} name was {friend}.",
            "So {hero} walked to {place}. There sat {friend}, a {f_girl} from school, with a sad face.",
        ),
        step(
            '"I have lost my {object}," said {friend}. "It is {color}."',
            '"Have you seen {a_color} {object}?" asked {friend}.',
            '"What are you looking for, {friend}?" asked {hero}. "My {color} {object}," {f_he} said.',
        ),
        step(
            '{hero} opened {his} bag and took out the {object}. "Is this yours, {friend}?"',
            "{hero} knew what to do. {He} gave the {object} to {friend}.",
            '"Here it is," said {hero}. "I found it {spot}."',
        ),
        step(
            '{friend} (jumped|danced|shouted) for joy. "Thank you, {hero}! I got it from my (mom|dad|grandma|sister)."',
            '"You are so (honest|kind), {hero}," said {friend}, and {f_he} hugged the {object}.',
            "{friend} was so glad that {f_he} gave {hero} (a cookie|a flower|a sweet|a hug).",
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
