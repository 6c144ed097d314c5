"""A plain English text of a little over 512 tokens, written for these tests, to measure a real model's perplexity on."""

TEXT = """The ferry to the island leaves twice a day in winter, once before the shops open and once after they have closed. \
In summer there are six crossings, and the small harbour is full of people who carry more bags than they need. My \
grandmother, who was born on the island, used to say that you can tell the season by the weight of the luggage. She kept \
the ticket office for almost forty years, and in all that time she missed only three mornings.

When I was a child I spent my holidays in the room above the office. From the window I could see the whole bay: the grey \
stones of the breakwater, the fishing boats with their painted names, and far away, on clear days, the lighthouse at the \
northern cape. At night the beam of the lighthouse crossed the ceiling every twelve seconds. I counted the seconds until \
I fell asleep, and I never reached more than a hundred.

The work of the office was simple, but it had to be done with care. Every ticket was written by hand in a large green \
book, with the name of the passenger, the date, and the number of boxes or animals. A bicycle paid half the price of an \
adult. A goat paid the same as a child, which made my uncle laugh each time he brought his goats to the market. Letters \
travelled for free, because the first captain had promised it to the village, and nobody wanted to be the one who broke \
the promise.

One evening in November a storm came up from the west, much faster than the radio had said. The last boat was already on \
its way, with nine passengers and the doctor on board. My grandmother lit the old oil lamp and put it in the window, \
although the lighthouse was working and the captain knew the coast better than his own kitchen. She said that a light in \
a house is different from a light on a rock, because somebody has to be awake beside it. We sat there for two hours and \
listened to the wind. Then we heard the horn of the ferry, first once and then three times, which meant that everyone \
was safe and that they would like some hot soup.

Today the tickets are sold by a machine that stands where the door used to be. It speaks four languages and never makes \
a mistake with the change. The green books are in the museum, behind glass, and the page that is shown to the visitors is \
the page of that evening in November. Under the list of the passengers you can read a short line in the handwriting of my \
grandmother: all of them home, soup for ten, one bowl broken."""
