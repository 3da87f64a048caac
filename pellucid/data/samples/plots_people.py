"""Stories about what people do for each other: sharing, waiting, racing, being brave. Written for this project."""

from pellucid.data.samples.grammar import Plot, question, step
from pellucid.data.samples.plots_things import ASK_COLOR, ASK_HERO, CONFIRM_COLOR, DENY_COLOR, OWNS
from pellucid.data.samples.words import ANIMAL, COLOR, DAY, FEAR, FOOD, HELPER, NUMBER, PLACE, QUALITY, SPOT, THING

TURNS = Plot(
    "turns",
    THING,
    (COLOR, PLACE, HELPER),
    (
        step(
            "A {girl} named {hero} was playing with {friend} {at_place}. There they found {a_color} {object}.",
            "(One day|One morning|After school), {hero} found {a_color} {object} {at_place}. {friend} saw it too.",
            "Once there was a (loud|wild|strong) {girl} named {hero}. {He} was {at_place} with {friend}. "
            "There they found {a_color} {object}.",
        ),
        step(
            '"The {object} is mine!" said {hero}. "No, I saw it first!" said {friend}.',
            "{hero} wanted the {object}, and {friend} wanted it too.",
            '"Give me the {object}, {friend}!" shouted {hero}. But {friend} (shook {f_his} head|said no|would not let go).',
        ),
        step(
            "They pulled at the {object} and (shouted|yelled|screamed), and both of them got angry.",
            "{hero} pulled on one side, and {friend} pulled on the other side.",
            "{hero} called {friend} a bad name, and {friend} (pushed|pinched|kicked) {hero}.",
        ),
        step(
            'Then {hero}\'s {helper} came. "(Stop|Enough|Be quiet)!" {h_he} said to {hero} and {friend}.',
            "{hero}'s {helper} heard the noise and came to (look|see what was wrong).",
            '{friend} cried, and {hero}\'s {helper} took the {object} away. "What is going on here?" {h_he} asked.',
        ),
        step(
            '"Why do you not take turns, {hero}?" asked the {helper}.',
            "The {helper} told them to take turns.",
            '"One after the other," said the {helper}. "That is fair."',
        ),
        step(
            "So {hero} had the {object} in the morning, and {friend} had it in the afternoon.",
            "{hero} let {friend} go first. Then it was the turn of {hero}.",
            "First {friend} had the {object} for a while, and then {hero} had it.",
        ),
        step(
            "It was much more fun than fighting.",
            '"This is fun," said {hero}, and {friend} (agreed|nodded|laughed).',
            "Soon they forgot that they had been angry.",
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
            "There was a (hungry|happy|friendly|quiet) {girl} named {hero}. For lunch, {he} had {a_quality} {object}.",
            "(One day|One morning|Today), {hero} packed {a_quality} {object} for lunch.",
            "Once there was a {girl} named {hero} who had {a_quality} {object} in {his} lunch box.",
        ),
        step(
            "{He} sat down {at_place} to eat.",
            "At noon, {hero} went to {place} and (sat down|found a place to sit).",
            "{hero} took it to {place}, because it was a (sunny|lovely|warm) day.",
        ),
        step(
            "There {he} met {friend}, who had nothing to eat.",
            "A {f_girl} named {friend} sat there too, but {f_he} had no lunch.",
            '"Hello, {friend}," said {hero}. "Where is your lunch?" {friend} looked down.',
        ),
        step(
            '"I forgot my lunch," said {friend}. {f_His} tummy (rumbled|growled).',
            '"A dog ate my lunch," said {friend} (sadly|quietly).',
            "{friend} had dropped {f_his} lunch in the water and was very hungry.",
        ),
        step(
            "{hero} looked at the {object} for a moment. Then {he} knew what to do.",
            "{hero} was hungry too, but {he} felt sorry for {friend}.",
            '"I cannot eat while {friend} is hungry," thought {hero}.',
        ),
        step(
            '{He} cut the {object} in two. "Half is for you," {he} said to {friend}.',
            '"We can share my {object}, {friend}," said {hero}, and {he} (cut|broke) it in half.',
            "So {hero} gave {friend} half of the {object}.",
        ),
        step(
            "They ate together and (talked|laughed|sang|told jokes).",
            '"This {object} is (good|great|wonderful)," said {friend}. "Thank you, {hero}!"',
            "The {object} tasted better than ever, because they ate it together.",
        ),
        step(
            "{Number} days later, {hero} had no lunch, and this time {friend} shared with {him}.",
            "The next day, {friend} brought {number} cookies and gave them all to {hero}.",
            "After that, {friend} shared {number} (plums|nuts|grapes|sweets) with {hero}.",
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
            "On a (sunny|cold|rainy) day, {hero} walked to {place} with {a_quality} {object} in {his} (bag|basket|pocket).",
            "A (kind|gentle|brave) {girl} named {hero} was {at_place}. {He} had {a_quality} {object} with {him}.",
            "(One day|One cold day|One evening), {hero} took {a_quality} {object} to {place}.",
        ),
        step(
            "There was {a_animal} {spot}.",
            "{He} heard a (soft|small|strange) sound. It was {a_animal} {spot}.",
            "Then {hero} saw {a_animal}. It was hiding {spot}.",
        ),
        step(
            "The {animal} was (thin|weak|cold) and hungry.",
            'It looked at {hero} with big eyes. "You must be hungry, little {animal}," {he} said.',
            "The poor {animal} had not eaten for days.",
        ),
        step(
            "{hero} broke the {object} into small pieces and put them on the ground.",
            '"You can have my {object}," said {hero}, and {he} put it (down|on the ground).',
            "{He} held out a piece of the {object} and waited (quietly|without a sound).",
        ),
        step(
            "At first the {animal} was afraid, but then it came closer and ate.",
            "The {animal} ate all of the {object} and looked (happy|much better|pleased).",
            "Step by step, the {animal} came near. Then it ate the {object}.",
        ),
        step(
            "When {hero} went home, the {animal} followed {him}.",
            '{hero} told {friend} about it. "I want to see the {animal} too," {f_he} said.',
            "{hero} ran to fetch {his} friend {friend}, who loved animals.",
        ),
        step(
            "{hero} and {friend} built a little house for the {animal} out of (wood|boxes|straw|branches).",
            "{friend} brought (water|milk|a warm cloth|some straw), and {hero} stroked the {animal}.",
            "Together, {hero} and {friend} took care of the {animal}.",
        ),
        step(
            "Every day, they came back with something to eat, and the {animal} grew (big|strong|fat).",
            "Soon the {animal} was (well|strong|healthy) and jumped around {hero}.",
            "The {animal} was never hungry again.",
        ),
        step(
            "{hero} learned that a small gift can change a life.",
            "{hero} was happy, for {he} had found a new friend.",
            "And when {hero} is sad, the {animal} comes to cheer {him} up.",
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
            "The {helper} of {hero} had a box. In the box was {a_color} {object}, but nobody knew.",
            "A {girl} named {hero} got a (big|closed|heavy) box. {A_color} {object} was in it, but {he} did not know.",
            "One day, {a_color} {object} lay in a box for a (curious|lively|clever) {girl} named {hero}.",
        ),
        step(
            '"You may open it on {day}," said {his} {helper}.',
            "{His} {helper} told {him} to wait until {day}.",
            '"Do not open the box before {day}, {hero}," {his} {helper} said.',
        ),
        step(
            "{hero} shook the box and (listened|put {his} ear on it). Something moved.",
            "It was hard to wait. {hero} walked around the box all day.",
            "{He} looked at the box (again and again|every hour|before bed) and wondered what was inside.",
        ),
        step(
            '{friend} came to visit. "Let us open it now," {f_he} said.',
            '"Just one little look, {hero}," said {friend}. "Nobody will know."',
            "{His} friend {friend} wanted to open the box (at once|with a knife|right away).",
        ),
        step(
            '"No, {friend}," said {hero}. "I promised to wait."',
            "{hero} wanted to say yes, but {he} shook {his} head.",
            '{hero} sat down on the box. "We must wait, {friend}," {he} said.',
        ),
        step(
            "At last, it was {day}. {hero} opened the box and saw the {object}.",
            '{day} came, and the {helper} smiled. "Now open it, {hero}!" It was {a_object}.',
            "On {day}, {hero} lifted the lid. There was the {object}, all {color} and (new|shiny|bright).",
        ),
        step(
            '"It was worth the wait," said {hero}, and {he} thanked {his} {helper}.',
            '"You waited so well," said the {helper}. "I am proud of you, {hero}."',
            "{hero} (laughed|cheered|danced), and the {helper} laughed too.",
        ),
        step(
            "Then {hero} showed the {object} to {friend}, and they played all day.",
            "{friend} was allowed to hold the {object} first.",
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
            "There was a fast {girl} named {hero}. {He} wanted to win a race, because the prize was {a_color} {object}.",
            "There was a big race, and the prize was {a_color} {object}. A {girl} named {hero} wanted to win it.",
            "(One day|Last summer|In spring), {hero} ran in a race. The winner would get {a_color} {object}.",
        ),
        step(
            "The race was {at_place}, and {number} children took part.",
            "{Number} children came to {place} to run.",
            "All the people came to {place} to see the {number} runners.",
        ),
        step(
            '"I will win the {object}," said {hero}. "We will see," said {friend}.',
            "{friend} was there too, and {f_he} was as fast as {hero}.",
            '"Good luck, {hero}," said {friend}, who stood next to {him}.',
        ),
        step(
            '"(Ready, set, go|One, two, three)!" And off they went. {hero} was in front.',
            "The whistle blew, and {hero} ran like the wind.",
            "{hero} ran (faster and faster|as fast as {he} could). Only {friend} was close behind.",
        ),
        step(
            "Then {friend} (fell|stumbled|tripped) and hurt {f_his} (knee|foot|leg).",
            'Suddenly, there was a cry. "My foot!" called {friend} from the ground.',
            "But then {friend} stepped on a stone and fell down hard.",
        ),
        step(
            "{hero} could see the finish, but {he} turned around and ran back to {friend}.",
            "{hero} stopped at once. A friend was more important than the {object}.",
            '"Wait, {friend}, I am coming," called {hero}, and {he} left the race.',
        ),
        step(
            "{He} helped {friend} up, and they walked to the finish together.",
            '"Lean on me, {friend}," said {hero}. They were the last of all.',
            "Arm in arm, {hero} and {friend} came in last, but everybody (clapped|cheered).",
        ),
        step(
            'The judge said, "{hero} has the best heart," and gave {him} the {object}.',
            'The winner came to {hero}. "You should have the {object}," the winner said.',
            "The people gave the {object} to {hero}, because {he} had been so kind.",
        ),
        step(
            "{hero} and {friend} shared the {object}, and they were both happy.",
            '"It is for both of us," said {hero}, and {friend} (smiled|beamed|laughed).',
            "{friend} thanked {hero} with all {f_his} heart.",
        ),
        step(
            "{hero} learned that being kind is better than being first.",
            "You do not have to be first to win, and {hero} knew it now.",
            "That is why the {color} {object} still reminds {hero} of a good deed.",
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
            "When {he} thought of {fear}, {he} (shook|trembled) and wanted to run away.",
            "Because of {fear}, {he} could not sleep at night.",
            "{He} stayed at home all day, only because of {fear}.",
        ),
        step(
            'One day, {friend} asked, "What are you afraid of, {hero}?"',
            "A {f_girl} named {friend} lived next door and saw how (scared|afraid) {hero} was.",
            "{hero} told {his} friend {friend} about it. {friend} did not laugh at {him}.",
        ),
        step(
            '"I know a trick," said {friend}. "Hold your {object} and count to {number}."',
            '{friend} said, "Take your {object} into your hand, {hero}, and count to {number}."',
            '"When I am afraid, I count to {number}," said {friend}. "Your {object} can help you."',
        ),
        step(
            "That evening, {hero} was scared again. {He} took the {object} and began to count.",
            "The next time, {hero} held the {color} {object} tight and counted (slowly|out loud).",
            "{hero} tried it at once. {He} closed {his} eyes and pressed the {object} to {his} heart.",
        ),
        step(
            "At {number}, {he} was calm.",
            "When {he} came to {number}, the fear was (smaller|weaker|almost gone).",
            '"One, two, three," {he} whispered, up to {number}. Nothing bad happened.',
        ),
        step(
            '"It works, {friend}!" called {hero}. "I am not afraid of {fear} anymore."',
            "{hero} ran to {friend} and told {f_him} that {fear} could not scare {him} now.",
            "The next day, {hero} thanked {friend} for the trick.",
        ),
        step(
            '"You did it yourself, {hero}," said {friend}.',
            "{friend} was proud of {hero} and gave {him} a hug.",
            '"I knew that you were brave," said {friend}, and {f_he} (winked|smiled|laughed) at {hero}.',
        ),
        step(
            "{hero} learned that everybody is afraid sometimes, and that is all right.",
            "Now {hero} is the bravest {girl} in the (street|town|village).",
            "And the {object} sits by the bed of {hero}, just in case.",
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
            "But the first picture looked like {a_animal}.",
            '{hero} tried, but it was not easy. "That looks like {a_animal}," said {his} (brother|sister|cousin).',
            "{hero} took a brush and began. When {he} was done, the {object} looked like {a_animal}.",
        ),
        step(
            '"I cannot do it," {he} said, and {he} (threw the brush away|tore up the paper|hid the picture).',
            "{hero} was so (angry|upset|cross) that {he} spilled the paint.",
            "{hero} felt like giving up. Who would want such a picture?",
        ),
        step(
            'Then {friend} came in. "Nobody can do it the first time, {hero}," {f_he} said.',
            '"It is a nice {animal}," said {friend}. "Now look at a real {object}, {hero}, and try again."',
            "{His} friend {friend} saw the picture and did not laugh. {f_He} told {hero} to try again.",
        ),
        step(
            "So {hero} tried again. {He} painted the {object} {number} times.",
            "{friend} sat down with {hero}, and they painted {number} pictures of the {object}.",
            "{hero} practiced for {number} days, and {friend} helped {him}.",
        ),
        step(
            "Every {object} was a little better than the one before.",
            "With each picture, {hero} got better.",
            "The lines became straight, and the {color} paint stayed where it should.",
        ),
        step(
            "The last {object} looked so real that you wanted to touch it.",
            'At last it was done. "That is the best {object} I have ever seen," said {friend}.',
            "In the end, the {object} was {color} and (bright|beautiful|just right).",
        ),
        step(
            '{hero} gave the picture to {his} {helper}. "It is (wonderful|perfect|lovely)!" {h_he} said.',
            "The {helper} was so (happy|pleased) that {h_he} hung the picture on the wall.",
            "{His} {helper} looked at it and had tears of joy in {h_his} eyes.",
        ),
        step(
            "{hero} learned that you get better if you try again.",
            '"Never give up," {hero} says now to everybody.',
            "And {hero} thanked {friend}, who had believed in {him}.",
        ),
    ),
    (
        ASK_COLOR,
        CONFIRM_COLOR,
        DENY_COLOR,
        question("What did {hero} paint?", "({hero} painted {a_object}.|{He} painted {a_color} {object}.)"),
        question("What did the first picture look like?", "(It looked like {a_animal}.|Like {a_animal}.)"),
        question("Who got the picture?", "({His} {helper} got it.|{hero}'s {helper} got it.)"),
        question("Who told {hero} to try again?", "({friend} did.|It was {friend}.)"),
        question("Did {hero} give up?", "No, {hero} tried again."),
        question("How did the story end?", "{hero} gave the picture to {his} {helper}."),
    ),
)

ALL: tuple[Plot, ...] = (TURNS, LUNCH, HUNGRY_ANIMAL, SECRET_BOX, RACE, BRAVE, PAINTING)
