"""Prompts that benchmarks put load on an engine with; written for this purpose.

Knows: questions by kind, from predictable answers (math, code) to hardly predictable ones (poetry).
Does not know: tokens, chat templates, or who asks.
"""

from __future__ import annotations

from itertools import chain

MATH = (
    "A tram carries 38 people. At one stop 14 get off and 9 get on. How many people are on the tram now?",
    "What is 27 times 14? Show each step.",
    "A box holds 12 eggs. A farm fills 35 boxes and has 7 eggs left over. How many eggs did it have?",
    "Solve for x: 5x - 8 = 3x + 12.",
    "A rectangle is 9 cm long and 4 cm wide. What are its area and its perimeter?",
    "Nina reads 18 pages a day. How many days does she need for a book of 252 pages?",
    "What is 3/4 of 160, and what is 15% of that?",
    "A jacket costs 80 euros. It is reduced by 25%, then by another 10%. What does it cost in the end?",
    "List the prime numbers between 40 and 70.",
    "A cyclist rides 45 km in 2.5 hours. What is the average speed?",
    "Find the sum of all whole numbers from 1 to 60.",
    "Two numbers add up to 31 and differ by 7. What are they?",
    "A tank loses 6 litres an hour and holds 150 litres. After how many hours is it one third full?",
    "What is the greatest common divisor of 84 and 126? Explain how you find it.",
    "A recipe for 4 people needs 300 g of flour. How much flour do 10 people need?",
    "Factor x^2 + 7x + 12.",
    "The angles of a triangle have the ratio 2:3:4. How large is each of them?",
    "How many different ways are there to arrange the letters of the word LAMP?",
    "A bank pays 3% interest a year. What do 500 euros grow to in two years?",
    "Convert 0.375 into a fraction in lowest terms.",
    "If a die is thrown twice, what is the probability that the sum is 9?",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel?",
    "What is the average of 12, 19, 23, 8 and 18?",
    "Work out 2^10 - 3^5 step by step.",
)

CODE = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a Python function that checks whether a string is a palindrome, ignoring case and spaces.",
    "Show a SQL query that counts the orders of each customer in a table named orders.",
    "Write a JavaScript function that removes duplicates from an array.",
    "Write a Python class for a stack with push, pop and peek.",
    "Explain what this does: print([x * x for x in range(10) if x % 2 == 0])",
    "Write a C function that swaps two integers through pointers.",
    "Write a Python function that merges two sorted lists into one sorted list.",
    "Write a shell command that finds all files larger than 10 MB in the current folder.",
    "Write a Python function that counts how often each word occurs in a text.",
    "Write a binary search in Python and explain its running time.",
    "Write a Java method that reverses a string without library calls.",
    "Write HTML for a form with a name field, an e-mail field and a submit button.",
    "Write a Python decorator that prints how long a function took.",
    "How do I read a CSV file in Python and print its second column?",
    "Write a Python generator that yields the prime numbers.",
    "Write a regular expression for a date such as 2024-05-17 and explain its parts.",
    "Write a Rust function that returns the largest element of a slice.",
    "Fix this Python function: def mean(xs): return sum(xs) / len(x)",
    "Write a Python function that flattens a nested list.",
    "Write a CSS rule that centres a box in the middle of the page.",
    "Write unit tests in Python for a function add(a, b).",
    "Write a Python function that converts Roman numerals to integers.",
    "Write a Go program that prints the numbers from 1 to 100, with Fizz for multiples of three.",
)

CHAT = (
    "How do I make a good cup of tea?",
    "What should I pack for a weekend in the mountains in October?",
    "Can you explain what inflation is, in simple words?",
    "I cannot fall asleep at night. What could I try?",
    "What is the difference between a crocodile and an alligator?",
    "Write a short e-mail to my landlord about a dripping tap.",
    "How does a refrigerator keep things cold?",
    "What are three good questions to ask at a job interview?",
    "Recommend a plan for learning to run five kilometres.",
    "Why do leaves change their colour in autumn?",
    "My plant has yellow leaves. What may be wrong with it?",
    "How do I ask a colleague politely to be quieter?",
    "What is a healthy breakfast that takes five minutes?",
    "Tell me about the history of the bicycle.",
    "How can I remember the names of people that I meet?",
    "What should I know before I adopt a dog?",
    "Explain how vaccines work to a ten-year-old.",
    "How do I remove a red wine stain from a shirt?",
    "What are the pros and cons of working from home?",
    "Describe a typical day of a lighthouse keeper.",
    "How do bees make honey?",
    "Give me some ideas for a birthday present for my grandmother.",
    "What does a solar panel do, and when is it worth its price?",
    "How can I write a better introduction for my school report?",
)

POETRY = (
    "Write four lines about a fox who crosses a frozen river.",
    "Write a short poem about rain on a tin roof.",
    "Write a haiku about the first day of spring.",
    "Write a poem about an old clock that has stopped.",
    "Write a rhyme about a cat that wants to be a sailor.",
    "Write a poem about the moon, without using the word moon.",
    "Write a love poem from a bridge to its river.",
    "Write six lines about the smell of bread in the morning.",
    "Write a poem about a lost glove.",
    "Write a ballad of a ship that sails in fog.",
    "Write a poem in which every line begins with the word Somewhere.",
    "Write a sad poem about an empty playground.",
    "Write a poem about the colour blue.",
    "Write a lullaby for a small dragon.",
    "Write a poem about two stones that lie in a desert.",
    "Write four lines about a letter that never arrived.",
    "Write a funny poem about a forgetful wizard.",
    "Write a poem about winter in a large city.",
    "Write a sonnet about a garden at night.",
    "Write a poem about the sound of the sea in a shell.",
    "Write a poem in which the wind speaks.",
    "Write a short poem about growing old.",
    "Write a poem about a spider and its unfinished web.",
    "Write eight lines about a train at dawn.",
)

#: By name; mixed takes one of each kind in turn.
WORKLOADS: dict[str, tuple[str, ...]] = {
    "math": MATH,
    "code": CODE,
    "chat": CHAT,
    "poetry": POETRY,
    "mixed": tuple(chain.from_iterable(zip(MATH, CODE, CHAT, POETRY, strict=True))),
}
