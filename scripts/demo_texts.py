"""The texts of the demo and of the quickstart notebook, written for this project: passages, chat, essay, letter."""

PASSAGES = {
    "honeybee": (
        "A honeybee that has found flowers tells its sisters where they are by dancing on the comb. In the waggle "
        "dance the bee runs a short straight line while shaking its body, circles back, and runs the line again. The "
        "angle between the line and the vertical stands for the angle between the food and the sun, and the length of "
        "the run stands for the distance: roughly one second of waggling for each kilometre of flight. Karl von "
        "Frisch, an Austrian zoologist, worked this out by patient observation with marked bees and coloured dishes, "
        "and in 1973 he shared the Nobel Prize in Physiology or Medicine for it. Bees that follow the dance also "
        "taste the nectar on the dancer, so they know what to look for when they arrive."
    ),
    "suez": (
        "The Suez Canal joins the Mediterranean Sea to the Red Sea through Egypt and spares ships the voyage around "
        "Africa. It was dug between 1859 and 1869 under the direction of the Frenchman Ferdinand de Lesseps, and it "
        "runs for about 193 kilometres from Port Said in the north to the city of Suez in the south. Because the two "
        "seas stand at nearly the same level, the canal has no locks at all. Egypt took it over in 1956. It was "
        "closed from 1967 to 1975, and fourteen ships were trapped in its Great Bitter Lake for those eight years. In "
        "March 2021 the container ship Ever Given ran aground across it and held up world trade for six days. A "
        "second lane, opened in 2015, lets ships pass in both directions along part of the way."
    ),
    "braille": (
        "Louis Braille lost his sight as a small boy in his father's workshop near Paris, where harness and saddles "
        "were made. At the school for blind children in the capital he met a system of raised dots that an army "
        "officer, Charles Barbier, had proposed for messages read at night. Braille found it clumsy: each sign had "
        "twelve dots, more than one fingertip can feel at once. By 1824, when he was fifteen, he had cut it down to a "
        "cell of six dots in two columns, which gives sixty-three different signs. He added signs for numbers and for "
        "music, which he loved; he was an able organist. The school took up his alphabet officially only in 1854, two "
        "years after his death, and today it is used for nearly every written language."
    ),
    "fundy": (
        "The Bay of Fundy lies between the Canadian provinces of New Brunswick and Nova Scotia, and it has the "
        "highest tides on Earth. At its head the sea rises and falls by as much as sixteen metres, the height of a "
        "house with five floors. The reason is resonance. Water sloshing from the mouth of the bay to its end and "
        "back takes about thirteen hours, which is close to the twelve and a half hours between two tides, so each "
        "tide pushes the water at just the right moment, as one pushes a child on a swing. Twice a day more water "
        "enters the bay than flows in all the rivers of the world in the same time. Fishing boats at low tide rest on "
        "the mud beside wharves that tower above them."
    ),
    "obsidian": (
        "Obsidian is a natural glass. It forms where lava rich in silica cools so quickly that no crystals can grow "
        "in it, often at the edge of a flow or where lava meets water. Most of it is black, though traces of iron can "
        "make it brown and tiny bubbles can give it a golden sheen. When it is struck it breaks into flakes with "
        "curved faces, and the edge of a flake may be only a few millionths of a millimetre thick, far sharper than a "
        "steel scalpel. People of the Stone Age made knives and arrowheads of it and carried it over great distances. "
        "Since each volcano leaves its own mixture of trace elements, archaeologists can tell from which mountain a "
        "blade came, and so draw the trade routes of ten thousand years ago."
    ),
    "castling": (
        "Castling is the only move in chess in which a player moves two pieces at once. The king goes two squares "
        "towards a rook, and that rook jumps over it to the square on the other side. It is allowed only if neither "
        "the king nor that rook has moved before, if no piece stands between them, and if the king is not in check, "
        "does not pass over an attacked square and does not land on one. The rook itself may be under attack. The "
        "move took its present form in Europe in the sixteenth and seventeenth centuries; before that a king could "
        "once in a game make a leap. Its purpose is twofold: it brings the king behind a wall of pawns, and it brings "
        "a rook from the corner into the middle, where it can work."
    ),
    "cactus": (
        "Most plants open the pores of their leaves by day, to take in carbon dioxide while there is light. In a "
        "desert that would cost too much water. A cactus therefore keeps its pores shut while the sun shines and "
        "opens them at night, when the air is cool. It stores the gas as malic acid in its cells until morning, and "
        "by day it turns the acid back into carbon dioxide behind closed pores and makes sugar from it. Someone who "
        "chews a piece of such a plant at dawn finds it sour, and at dusk bland. Botanists call this way of life "
        "crassulacean acid metabolism, after the family of stonecrops in which it was first studied. The pineapple "
        "and the agave do the same. They grow slowly, but they need far less water than a cabbage."
    ),
    "eddystone": (
        "The Eddystone Rocks lie in the English Channel, about twenty kilometres south-west of Plymouth, and at high "
        "water the sea covers them. Four lighthouses have stood there. The first, made of wood by Henry Winstanley in "
        "1698, was swept away with its builder in the great storm of 1703. The second burned down in 1755. John "
        "Smeaton then built a tower of granite blocks cut like dovetails, so that each held its neighbours fast, and "
        "bound them with a lime that sets under water; he took the shape from the trunk of an oak. His tower outlived "
        "the rock on which it stood: the sea hollowed the reef beneath it, and in 1882 it was replaced by the present "
        "one. The upper part of Smeaton's tower stands today on the shore in Plymouth."
    ),
}

# (what the assistant is told, the order of the passages, the question); the first one fills the store
RAG_REQUESTS = [
    (
        "You answer questions from the passages below.",
        ["honeybee", "suez", "braille", "fundy", "obsidian", "castling", "cactus", "eddystone"],
        "Which Austrian zoologist worked out the waggle dance?",
    ),
    (
        "You are a careful librarian. Read the passages and answer in one sentence.",
        ["cactus", "fundy", "honeybee", "eddystone", "castling", "suez", "obsidian", "braille"],
        "Between which two Canadian provinces does the Bay of Fundy lie?",
    ),
    (
        "Today is Tuesday. You help visitors of a science museum; keep it short.",
        ["braille", "castling", "obsidian", "cactus", "suez", "eddystone", "honeybee", "fundy"],
        "Which officer proposed a system of raised dots to be read at night?",
    ),
    (
        "Use only what the following texts say. If they do not say it, say so.",
        ["eddystone", "obsidian", "suez", "castling", "braille", "cactus", "fundy", "honeybee"],
        "Under whose direction was the Suez Canal dug?",
    ),
    (
        "You are a quiz master who explains the answer to the players.",
        ["castling", "honeybee", "cactus", "obsidian", "eddystone", "fundy", "braille", "suez"],
        "What happened to the first lighthouse on the Eddystone Rocks?",
    ),
]

CHAT_SYSTEM = (
    "You are a patient astronomy teacher who talks to a school class. Answer the question in one or two short "
    "sentences and use plain words, because some of the children are only eight years old. If you are not sure, say "
    "so."
)
CHAT_TURNS = [
    (
        "Good morning! We are the third class of the school in Milton and we have many questions about the sky. "
        "First: which planet is the largest one in the solar system?"
    ),
    (
        "Thank you. Emma wants to know about the Moon. She has seen that it looks different each night. Why does the "
        "Moon change its shape?"
    ),
    (
        "Now a question from Tom, who has a book about rockets at home. In which year did people walk on the Moon for "
        "the first time, and who was the first?"
    ),
    (
        "Our next question is about stars. From our playground we can see hundreds of them on a clear night. What is "
        "a star made of?"
    ),
    ("Aisha has read that the Sun is a star as well. If that is so, why does it look so much bigger than the others?"),
    ("Ben asks about Saturn. In the pictures it has beautiful rings around it. What are the rings of Saturn made of?"),
]
CHAT_AFTER_LOSS = [
    "Before the bell rings: Tom was not listening. Could you tell him again who was the first to walk on the Moon?",
    (
        "And Ben would like to hear once more what the rings of Saturn are made of, because he wants to draw them at "
        "home."
    ),
]

# an essay whose first paragraph is edited from request to request; the rest stays as it is
ESSAY_OPENINGS = [
    (
        "This essay was written for the winter issue of a magazine about everyday things. It asks how the bicycle "
        "came to be what it is, and why it took so long."
    ),
    (
        "Draft two, shortened by the editor. How did the bicycle come to be what it is? Why did it take people nearly "
        "seventy years, once they had two wheels in a row, to find a shape that looks obvious to us? The essay "
        "follows the inventors."
    ),
    "For the reader in a hurry: this is a story of two wheels, of many small inventions, and of patience.",
    (
        "Revised on the third of May. The author thanks two readers who found mistakes in the dates of the first "
        "version, and the museum that allowed her to ride a copy of the wooden machine. Her subject is the bicycle "
        "and its slow birth."
    ),
]
ESSAY_BODY = [
    (
        "The first machine with two wheels in a row had no pedals. Karl Drais, a forester and inventor from Mannheim, "
        "rode it in June 1817: a wooden beam, two wheels shod with iron, a saddle, and a bar to steer the front "
        "wheel. The rider sat on it and pushed himself along with his feet. On a good road Drais covered thirteen "
        "kilometres in less than an hour, faster than the mail coach. Horses were dear that year, because a volcano "
        "on the other side of the world had spoiled the summer of 1816 and oats were scarce, and some historians "
        "think that this is what set him thinking. The machine was a fashion for a season. Then towns forbade it on "
        "their pavements, and on the ruts of the roads it was hard to balance."
    ),
    (
        "For more than forty years nobody took the next step, perhaps because nobody believed that a person could "
        "keep his feet off the ground and not fall. It was taken in Paris in the eighteen-sixties, when cranks and "
        "pedals were fixed to the front wheel. Pierre Michaux, a blacksmith, his son Ernest and his workman Pierre "
        "Lallement have each been named as the one who did it. The machines were heavy, their wheels were of wood "
        "with iron tyres, and in England people called them boneshakers. But they sold by the thousand, riding "
        "schools opened, and in 1869 a race was held from Paris to Rouen, a hundred and twenty-three kilometres, "
        "which the winner finished in less than eleven hours."
    ),
    (
        "A pedal fixed to the wheel has a fault: one turn of the feet is one turn of the wheel. Whoever wanted to go "
        "faster needed a larger wheel, and so the front wheel grew, as far as the rider's legs allowed, to a metre "
        "and a half across. Steel tubes and wire spokes made it light. James Starley of Coventry, who had made sewing "
        "machines, improved the spokes so that they could carry the pull of the pedals. The high wheel was fast and "
        "beautiful, but it was a thing for athletic young men: the rider sat almost above the axle, and a stone on "
        "the road could throw him over the handlebar head first."
    ),
    (
        "The answer was the chain. With a large sprocket at the pedals and a small one at the rear wheel, a wheel of "
        "ordinary size could be made to turn more than once for each turn of the feet. In 1885 John Kemp Starley, the "
        "nephew of James, showed the Rover safety bicycle: two wheels of nearly the same size, a chain to the rear "
        "one, a saddle between them, and a frame that soon became the diamond of tubes that we know. At first riders "
        "of the high wheel laughed at it. Then it began to win races, and within ten years the high wheel was gone."
    ),
    (
        "One thing was missing. Tyres of solid rubber shook the rider on every cobble. In 1888 John Boyd Dunlop, a "
        "veterinary surgeon in Belfast, glued tubes filled with air around the wheels of his small son's tricycle, "
        "because the boy complained of the bumps. The air tyre was not only softer but faster, since a wheel that "
        "does not jump loses less. A Scotsman, Robert Thomson, had patented the same idea in 1845 and had been "
        "forgotten. The brothers Michelin in France then made a tyre that could be taken off and mended by the "
        "roadside in a quarter of an hour."
    ),
    (
        "What followed changed more than sport. In the eighteen-nineties the price of a bicycle fell from half a "
        "year's wages of a workman to a few weeks'. Village people married partners from farther away, as the parish "
        "registers show. Women rode out alone, and the clothes in which one could do so became a matter of public "
        "quarrel. Clubs of cyclists asked for paved roads years before there were motor cars to use them, and many "
        "makers of cars and aeroplanes, the Wright brothers among them, learned their trade by mending bicycles."
    ),
]
ESSAY_QUESTIONS = [
    "Who rode the first machine with two wheels in a row?",
    "From which town to which town did the race of 1869 go?",
    "Who glued tubes filled with air around the wheels of a tricycle?",
    "Which machine did John Kemp Starley show in 1885?",
]

LETTER_NAMES = ["Ms Ana Ruiz", "Mr Bartholomew Featherstonehaugh", "Dr Li Wen", "Mrs Oluwaseun Adeyemi-Clarke"]
LETTER = """The Harbour Library
Members' Desk

Dear {name},

Thank you for joining the Harbour Library. Your membership begins on the first of the coming month and runs for one \
year. With it you may borrow up to twelve books, four films and two board games at a time. Books may be kept for \
four weeks, films and games for one week. If nobody else has asked for an item you may renew it twice, at the desk, \
by telephone or through your account.

Please collect your card within fourteen days at the desk on the ground floor, and bring a document that shows your \
address. The desk is open from nine to six on weekdays and from ten to two on Saturdays. The reading rooms on the \
upper floors stay open until nine in the evening; the room on the third floor is a quiet room, where telephones and \
conversation are not allowed.

Items that come back late cost ten pence a day, and never more than four pounds each. We send a reminder three days \
before an item is due, if you have given us an address for it. A lost book is charged at its price, or you may \
bring another copy in good condition.

On the second Thursday of each month we hold an evening for new members at half past six. There is a tour of the \
building, including the map room and the workshop where old bindings are mended, and afterwards there is tea. You \
are welcome to bring a friend, {name}, and you need not tell us beforehand.

With kind regards,
Teresa Holm
Head of the Members' Desk"""
