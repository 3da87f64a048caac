"""Stories about what people do for each other: sharing, waiting, racing, being brave. Written for this project.

How often a fact is said is as in `plots_things`.
"""

from pellucid.data.samples.grammar import Plot, question, step
from pellucid.data.samples.plots_things import ASK_COLOR, ASK_HERO, CONFIRM_COLOR, DENY_COLOR, OWNS
from pellucid.data.samples.words import ANIMAL, COLOR, DAY, FEAR, FOOD, HELPER, NUMBER, PLACE, QUALITY, SPOT, THING

TURNS = Plot(
    "turns",
    THING,
    (COLOR, PLACE, HELPER),
    (
        step(
            "A {girl} named {hero} was {at_place} with {friend}. There they found {a_color} {object}.",
            "(One day|One morning|After school), {hero} found {a_color} {object} {at_place}. {friend} saw it too.",
            "Once there was a (loud|wild|strong) {girl} named {hero} who found {a_color} {object} {at_place} with {friend}.",
        ),
        step(
            '"The {object} is mine!" said {hero}. "No, I saw it first!" said {friend}.',
            "{hero} wanted the {object}, and {friend} wanted the {object} too.",
            '"Give me the {object}, {friend}!" shouted {hero}. But {friend} (said no|would not let go).',
        ),
        step(
            "They pulled at the {object} and (shouted|yelled|screamed).",
            "{hero} pulled on one side, and {friend} pulled on the other side.",
            "{hero} called {friend} a bad name, and {friend} (pushed|pinched|kicked) {hero}.",
        ),
        step(
            'Then {hero}\'s {helper} came. "(Stop|Enough), {hero} and {friend}! Take turns," {h_he} said.',
            "{hero}'s {helper} heard the noise and told {hero} and {friend} to take turns.",
            '{hero}\'s {helper} took the {object} away. "You must (share|take turns)," {h_he} said.',
        ),
        step(
            "So {hero} had the {object} first, and then {friend} had the {object}.",
            "{hero} let {friend} go first. Then it was the turn of {hero}.",
            "{friend} had the {object} in the morning, and {hero} had it (later|at noon|after lunch).",
        ),
        step(
            "It was much more fun than fighting.",
            '"This is fun," said {hero}, and {friend} (agreed|nodded|laughed).',
            "Soon {hero} and {friend} forgot that they had been angry.",
        ),
        step(
            "{hero} and {friend} learned that sharing is better than fighting.",
            "Since then, {hero} and {friend} always take turns.",
            'In the evening, {hero} said, "Tomorrow you can have the {object} first, {friend}."',
        ),
    ),
    (
        ASK_COLOR,
        CONFIRM_COLOR,
        DENY_COLOR,
        question("What did {hero} and {friend} fight about?", "They fought about {a_object}."),
        question("Where was the {object}?", "(It was {at_place}.|The {object} was {at_place}.)"),
        question("Who told them to take turns?", "{hero}'s {helper} did."),
        question("Were they {at_other_place}?", "No, they were {at_place}."),
        question("How did the story end?", "{hero} and {friend} took turns."),
    ),
)

LUNCH = Plot(
    "lunch",
    FOOD,
    (QUALITY, PLACE, NUMBER),
    (
        step(
            "There was a (hungry|happy|friendly|quiet) {girl} named {hero}. For lunch, {hero} had {a_quality} {object}.",
            "(One day|One morning|Today), {hero} packed {a_quality} {object} for lunch.",
            "Once there was a {girl} named {hero} who had {a_quality} {object} for lunch.",
        ),
        step(
            "{hero} sat down {at_place} to eat.",
            "At noon, {hero} went to {place} and (sat down|found a place to sit).",
            "{hero} took it to {place}, because it was a (sunny|lovely|warm) day.",
        ),
        step(
            "There {hero} met {friend}, who had nothing to eat.",
            "A {f_girl} named {friend} sat there too, but {friend} had no lunch.",
            '"Hello, {friend}," said {hero}. "Where is your lunch?" {friend} looked down.',
        ),
        step(
            '"I forgot my lunch," said {friend} to {hero}.',
            '"A dog ate my lunch, {hero}," said {friend} (sadly|quietly).',
            '"My lunch fell into the water," said {friend} and looked very hungry.',
        ),
        step(
            "{hero} was hungry, but {he} felt sorry for {friend}.",
            '"I cannot eat while {friend} is hungry," thought {hero}.',
            "{hero} wanted to help {friend} and knew (what to do|how).",
        ),
        step(
            '{hero} cut the {object} in two. "Half is for you, {friend}," said {hero}.',
            '"We can share my {object}, {friend}," said {hero} and (cut|broke) it in half.',
            "So {hero} gave {friend} half of the {object}.",
        ),
        step(
            "{hero} and {friend} ate together and (talked|laughed|sang|told jokes).",
            '"This is (good|great|wonderful)," said {friend}. "Thank you, {hero}!"',
            "It tasted better than ever, because {hero} and {friend} ate it together.",
        ),
        step(
            "{Number} days later, {friend} shared {f_his} lunch with {hero}.",
            "The next day, {friend} brought {number} nuts and gave them all to {hero}.",
            "After that, {friend} shared {number} (plums|grapes|sweets) with {hero}.",
        ),
        step(
            "{hero} learned that sharing makes friends.",
            "And {hero} and {friend} still eat their lunch together.",
            "A shared lunch is a good lunch, and {hero} never forgot it.",
        ),
    ),
    (
        ASK_HERO,
        question("What did {hero} have for lunch?", "({hero} had {a_object}.|{He} had {a_quality} {object}.)"),
        question("Who had no lunch?", "{friend} had no lunch."),
        question("Where did they eat?", "They ate {at_place}."),
        question("Did they eat {at_other_place}?", "No, they ate {at_place}."),
        question("Did {hero} eat the {object} alone?", "No, {hero} shared it with {friend}."),
        question("Who shared the {object}?", "{hero} shared the {object} with {friend}."),
        question("How did the story end?", "{hero} and {friend} were friends."),
    ),
)

HUNGRY_ANIMAL = Plot(
    "hungry animal",
    FOOD,
    (QUALITY, PLACE, SPOT, ANIMAL),
    (
        step(
            "On a (sunny|cold|rainy) day, {hero} walked to {place} with {a_quality} {object}.",
            "A (kind|gentle|brave) {girl} named {hero} was {at_place}. {hero} had {a_quality} {object}.",
            "(One day|One cold day|One evening), {hero} took {a_quality} {object} to {place}.",
        ),
        step(
            "There was {a_animal} {spot}.",
            "{hero} heard a (soft|small|strange) sound. It was {a_animal} {spot}.",
            "Then {hero} saw {a_animal}. It was hiding {spot}.",
        ),
        step(
            "The animal was (thin|weak|cold) and hungry.",
            'It looked at {hero} with big eyes. "You must be hungry," said {hero}.',
            "The poor animal had not eaten for days, and {hero} felt sorry.",
        ),
        step(
            "{hero} broke the {object} into small pieces and put them on the ground.",
            '"You can have my {object}," said {hero}, and the animal ate (all of it|every bit).',
            "So {hero} gave it the {object}, and it (ate and ate|ate it all).",
        ),
        step(
            '{hero} told {friend} about it. "I want to see the animal too," said {friend}.',
            "{hero} ran to fetch {friend}, who loved animals.",
            "Then {hero} met {his} friend {friend}, who wanted to help (too|at once).",
        ),
        step(
            "{hero} and {friend} built a little house for the animal out of (wood|boxes|straw|branches).",
            "{friend} brought (water|milk|a warm cloth|some straw), and {hero} stroked the animal.",
            "Together, {hero} and {friend} took care of the animal.",
        ),
        step(
            "Every day, {hero} and {friend} came back, and the animal grew (big|strong|fat).",
            "Soon the animal was (well|strong|healthy) and jumped around {hero}.",
            "The animal was never hungry again, because {hero} and {friend} fed it.",
        ),
        step(
            "{hero} learned that a small gift can change a life.",
            "{hero} was happy, for {he} had found a new friend.",
            "And when {hero} is sad, the animal comes to cheer {him} up.",
        ),
    ),
    (
        ASK_HERO,
        question("What animal did {hero} meet?", "({hero} met {a_animal}.|It was {a_animal}.)"),
        question("Where was the {animal}?", "(It was {spot}.|The {animal} was {spot}.)"),
        question("What did the {animal} eat?", "(It ate {a_object}.|The {animal} ate the {object}.)"),
        question("Who helped {hero}?", "{friend} helped {him}."),
        question("Was the {animal} hungry?", "Yes, the {animal} was hungry."),
        question("Was {hero} {at_other_place}?", "No, {hero} was {at_place}."),
        question("How did the story end?", "The {animal} was well and had a friend."),
    ),
)

SECRET_BOX = Plot(
    "secret box",
    THING,
    (COLOR, HELPER, DAY),
    (
        step(
            "There was a box with {a_color} {object} in it, but a {girl} named {hero} did not know.",
            "A {girl} named {hero} got a (big|closed|heavy) box. In it was {a_color} {object}.",
            "One day, {a_color} {object} lay in a box for a (curious|lively|clever) {girl} named {hero}.",
        ),
        step(
            '"You may open the box on {day}, {hero}," said {his} {helper}.',
            "{His} {helper} told {hero} to wait until {day}.",
            '"Do not open the box before {day}, {hero}," {his} {helper} said.',
        ),
        step(
            "{hero} shook the box and (listened|put {his} ear on it). Something moved.",
            "It was hard to wait. {hero} walked around the box all day.",
            "{hero} looked at the box (again and again|every hour|before bed) and wondered.",
        ),
        step(
            '{friend} came to visit. "Let us open the box now, {hero}," said {friend}.',
            '"Just one little look, {hero}," said {friend}. "Nobody will know."',
            "{His} friend {friend} wanted to open the box (at once|with a knife|right away).",
        ),
        step(
            '"No, {friend}," said {hero}. "I promised to wait."',
            "{hero} wanted to say yes to {friend}, but {he} shook {his} head.",
            '{hero} sat down on the box. "We must wait, {friend}," said {hero}.',
        ),
        step(
            "At last, it was time. {hero} opened the box and saw the {object}.",
            '"Now open it, {hero}!" said {friend} on the right day. It was {a_object}.',
            "When the day came, {hero} opened the box. There was the {object}, all (new|shiny|bright).",
        ),
        step(
            "Then {hero} showed the {object} to everybody, and {friend} was happy too.",
            "{hero} let {friend} hold the {object} first.",
            '"Next time I will wait too," said {friend} to {hero}.',
        ),
        step(
            "{hero} learned that good things come to those who wait.",
            "And {hero} never forgot that a promise is a promise.",
            "Waiting is hard, but {hero} had done it.",
        ),
    ),
    (
        ASK_COLOR,
        CONFIRM_COLOR,
        DENY_COLOR,
        question("What was in the box?", "(In the box was {a_object}.|In the box was {a_color} {object}.)"),
        question("When did {hero} open the box?", "({hero} opened it on {day}.|{He} opened the box on {day}.)"),
        question("Who wanted to open the box early?", "{friend} wanted to open it early."),
        question("Who told {hero} to wait?", "({His} {helper} did.|It was {his} {helper}.)"),
        question("Was {a_other_object} in the box?", "No, it was {a_object}."),
        question("How did the story end?", "{hero} opened the box on {day} and found {a_object}."),
    ),
)

RACE = Plot(
    "race",
    THING,
    (COLOR, PLACE, NUMBER),
    (
        step(
            "There was a fast {girl} named {hero}. {hero} ran in a race to win {a_color} {object}.",
            "There was a race, and the prize was {a_color} {object}. A {girl} named {hero} wanted to win it.",
            "(One day|Last summer|In spring), {hero} ran in a race. The winner would get {a_color} {object}.",
        ),
        step(
            "The race was {at_place}, and {number} children took part.",
            "{Number} children came to {place} to run.",
            "All the people came to {place} to see the {number} runners.",
        ),
        step(
            '"I will win the {object}," said {hero}. "We will see," said {friend}.',
            "{friend} was there too, and {friend} was as fast as {hero}.",
            '"Good luck, {hero}," said {friend}. "The {object} is (nice|lovely)."',
        ),
        step(
            "The race began. Soon {friend} (fell|stumbled|tripped) and hurt {f_his} (knee|foot|leg).",
            'They ran (off|fast|like the wind). Then there was a cry. "My foot!" called {friend}.',
            "{hero} was in front when {friend} (slipped|tripped) in the grass and fell down hard.",
        ),
        step(
            "{hero} could see the finish, but {he} ran back to {friend}.",
            "{hero} stopped at once. {friend} was more important than the {object}.",
            '"Wait, {friend}, I am coming," called {hero} and left the race.',
        ),
        step(
            "{hero} helped {friend} up, and they walked to the finish together.",
            '"Lean on me, {friend}," said {hero}. They were the last of all.',
            "Arm in arm, {hero} and {friend} came in last, but everybody (clapped|cheered).",
        ),
        step(
            '"{hero} has the best heart," said the judge and gave {him} the {object}.',
            'The winner said, "You should have the {object}, {hero}."',
            "The people gave the {object} to {hero}, because {he} had been so kind.",
        ),
        step(
            "{hero} and {friend} shared the {object}, and they were both happy.",
            '"The {object} is for both of us," said {hero}, and {friend} (smiled|beamed|laughed).',
            "{hero} learned that being kind is better than being first.",
        ),
    ),
    (
        ASK_COLOR,
        CONFIRM_COLOR,
        DENY_COLOR,
        question("What was the prize?", "(The prize was {a_object}.|It was {a_color} {object}.)"),
        question("Where was the race?", "(It was {at_place}.|The race was {at_place}.)"),
        question("Who fell?", "({friend} fell.|It was {friend}.)"),
        question("Who stopped to help?", "({hero} stopped to help {friend}.|It was {hero}.)"),
        question("How many children ran?", "(There were {number} children.|{Number} children ran.)"),
        question("Was the race {at_other_place}?", "No, the race was {at_place}."),
        question("How did the story end?", "{hero} got the {object} for being kind."),
    ),
)

BRAVE = Plot(
    "brave",
    THING,
    (COLOR, FEAR, NUMBER),
    (
        OWNS,
        step(
            "But {hero} was afraid of {fear}.",
            "There was only one thing that {hero} feared: {fear}.",
            "{hero} liked many things, but {he} did not like {fear}.",
        ),
        step(
            'One day, {friend} asked, "What is wrong, {hero}?"',
            "A {f_girl} named {friend} lived next door and saw how (scared|afraid) {hero} was.",
            "{hero} told {his} friend {friend} the truth. {friend} did not laugh.",
        ),
        step(
            '"I know a trick," said {friend}. "Hold your {object} and count to {number}."',
            '{friend} said, "Take your {object} into your hand, {hero}, and count to {number}."',
            '"When I am afraid, I count to {number}," said {friend}. "Your {object} can help you."',
        ),
        step(
            "That evening, {hero} was scared again. {hero} took the {object} and began to count.",
            "The next time, {hero} held the {object} tight and counted (slowly|out loud).",
            "{hero} tried it at once and pressed the {object} to {his} heart.",
        ),
        step(
            "After that, {hero} was (calm|not scared) and could smile again.",
            "When {hero} had counted, the fear was (smaller|weaker|almost gone).",
            '"It works, {friend}!" called {hero}. "I am not afraid anymore."',
        ),
        step(
            '"You did it yourself, {hero}," said {friend}.',
            "{friend} was proud of {hero} and gave {him} a hug.",
            '"I knew that you were brave, {hero}," said {friend} and (winked|smiled|laughed).',
        ),
        step(
            "{hero} learned that everybody is afraid sometimes, and that is all right.",
            "Now {hero} is the bravest {girl} in the (street|town|village).",
            "And the {object} is always near {hero}, just in case.",
        ),
    ),
    (
        ASK_COLOR,
        CONFIRM_COLOR,
        DENY_COLOR,
        ASK_HERO,
        question("What was {hero} afraid of?", "({hero} was afraid of {fear}.|{He} was afraid of {fear}.)"),
        question("Who knew a trick?", "({friend} knew a trick.|It was {friend}.)"),
        question("What did {hero} hold?", "({He} held {a_object}.|{hero} held the {color} {object}.)"),
        question("Up to what number did {hero} count?", "({He} counted to {number}.|{hero} counted to {number}.)"),
        question("How did the story end?", "{hero} was not afraid anymore."),
    ),
)

PAINTING = Plot(
    "painting",
    THING,
    (COLOR, HELPER, ANIMAL, NUMBER),
    (
        step(
            "For {his} {helper}, {hero} wanted to paint {a_color} {object}.",
            "On a rainy day, {hero} wanted to paint {a_color} {object} for {his} {helper}.",
            "A {girl} named {hero} liked to paint. {His} {helper} wished for a picture of {a_color} {object}.",
            '"I will paint {a_color} {object}," said {hero} to {his} {helper}.',
        ),
        step(
            "But the first {object} looked like {a_animal}.",
            "{hero} tried, but it was not easy. The {object} looked like {a_animal}.",
            "{hero} began (at once|happily), but the {object} looked like {a_animal}.",
        ),
        step(
            '"I cannot do it," said {hero} and (cried|tore up the paper|hid the picture).',
            "{hero} was so (angry|upset|cross) that {he} spilled the paint.",
            "{hero} felt like giving up. Who would want such a picture?",
        ),
        step(
            'Then {friend} came in. "Nobody can do it the first time, {hero}," said {friend}.',
            '"Look at a real {object}, {hero}," said {friend}, "and try again."',
            "{His} friend {friend} saw the {object} and told {hero} to try again.",
        ),
        step(
            "So {hero} tried again and painted the {object} {number} times.",
            "{friend} sat down with {hero}, and they painted the {object} {number} times.",
            "{hero} practiced for {number} days, and {friend} helped {him}.",
        ),
        step(
            "Every {object} was a little better than the one before.",
            "With each {object}, {hero} got better.",
            "The lines became straight, and {hero} began to (smile|sing|laugh).",
        ),
        step(
            "The last {object} looked so real that you could touch it.",
            '"That is the best {object} of all, {hero}," said {friend}.',
            "In the end, the {object} was (bright|beautiful|just right).",
        ),
        step(
            '"What a (wonderful|perfect|lovely) {object}, {hero}!" everybody said.',
            "Everybody was so (happy|pleased) that they hung the {object} on the wall.",
            "It was a fine present, and {hero} was (proud|glad|happy).",
        ),
        step(
            "{hero} learned that you get better if you try again.",
            '"Never give up," {hero} says now to {friend}.',
            "And {hero} thanked {friend}, who had helped {him}.",
        ),
    ),
    (
        ASK_COLOR,
        CONFIRM_COLOR,
        DENY_COLOR,
        question("What did {hero} paint?", "({hero} painted {a_object}.|{He} painted {a_color} {object}.)"),
        question("What did the first picture look like?", "(It looked like {a_animal}.|Like {a_animal}.)"),
        question("Who was the picture for?", "(It was for {his} {helper}.|It was for {hero}'s {helper}.)"),
        question("Who told {hero} to try again?", "({friend} did.|It was {friend}.)"),
        question("Did {hero} give up?", "No, {hero} tried again."),
        question("How did the story end?", "{hero} painted a good picture of {a_object}."),
    ),
)

ALL: tuple[Plot, ...] = (TURNS, LUNCH, HUNGRY_ANIMAL, SECRET_BOX, RACE, BRAVE, PAINTING)
