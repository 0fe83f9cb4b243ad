"""Tasks of at most five calls: one file, one folder, one calculation, or a few files read together.

Knows how the files are laid out, what the user says, and how it is done, in world.py's words for calls and
results.
"""

from scripts.embedded.maker import Maker
from scripts.embedded.world import (
    NO_NUMBER,
    Answer,
    Solver,
    Task,
    calculate,
    count,
    failed,
    in_words,
    list_files,
    listed,
    page,
    read_file,
    search,
    value,
    write_file,
)


def greeting(maker: Maker) -> Task:
    """No tool is needed."""
    request, reply = maker.rng.choice(
        (
            ("Hello!", "Hello! I can work with files and numbers."),
            ("Hello", "Hello! I can work with files and numbers."),
            ("Hi there", "Hello! I can work with files and numbers."),
            ("Hi!", "Hello! I can work with files and numbers."),
            ("Hey", "Hello! I can work with files and numbers."),
            ("Good morning", "Hello! I can work with files and numbers."),
            ("hello, how are you?", "Hello! I can work with files and numbers."),
            ("What can you do?", "I can list, read, search, count and write files, and calculate."),
            ("How can you help me?", "I can list, read, search, count and write files, and calculate."),
            ("What are your tools?", "I can list, read, search, count and write files, and calculate."),
            ("Who are you?", "I am a small model that works with files and numbers."),
            ("What are you?", "I am a small model that works with files and numbers."),
            ("Thanks!", "You are welcome."),
            ("Thank you.", "You are welcome."),
            ("thanks, that was good work", "You are welcome."),
        )
    )

    def solve() -> Solver:
        return Answer(reply, (reply,))
        yield ()

    return Task("greeting", {}, request, solve)


def arithmetic(maker: Maker) -> Task:
    """One calculation, given as an expression or in words."""
    a, b, c = (maker.number() for _ in range(3))
    if maker.rng.random() < 0.4:
        said, expression = maker.rng.choice(
            (
                (f"{a} plus {b}", f"{a} + {b}"),
                (f"{a} minus {b}", f"{a} - {b}"),
                (f"{a} times {b}", f"{a} * {b}"),
                (f"the sum of {a} and {b}", f"{a} + {b}"),
                (f"the larger of {a} and {b}", f"max({a}, {b})"),
                (f"the smaller of {a} and {b}", f"min({a}, {b})"),
            )
        )
    else:
        forms = (
            f"{a} + {b}",
            f"{a} - {b}",
            f"{a} * {b}",
            f"{a} + {b} + {c}",
            f"{a} * {b} - {c}",
            f"max({a}, {b})",
        )
        said = expression = maker.rng.choice(
            (*forms, f"min({a}, {b}, {c})", f"({a} + {b}) * {c}", f"{a} - {b} + {c}")
        )
    request = maker.say(
        f"What is {said}?", f"Calculate {said}.", f"How much is {said}?", f"Please compute {said}"
    )

    def solve() -> Solver:
        (result,) = yield (calculate(expression),)
        return Answer(f"The result is {value(result)}.", (value(result),))

    return Task("arithmetic", {}, request, solve)


def read_one(maker: Maker) -> Task:
    """What one file holds: a number, some words, or nothing because it is not there."""
    path, other = maker.path(), maker.path()
    content = str(maker.number()) if maker.rng.random() < 0.6 else maker.note()
    missing = maker.rng.random() < 0.2
    request = maker.say(
        f"What is in {path}?",
        f"Read {path}.",
        f"What does {path} say?",
        f"Show me {path}",
        f"Please read {path} for me.",
        f"Tell me the content of {path}.",
        f"Which number is in {path}?",
    )

    def solve() -> Solver:
        (result,) = yield (read_file(path),)
        if failed(result):
            return Answer(f"There is no file {path}.", (path, "no file"))
        return Answer(f"{path} holds {page(result)[0]}.", (path, page(result)[0]))

    return Task("read_one", {other: content} if missing else {path: content}, request, solve)


def list_one(maker: Maker) -> Task:
    """The names in a folder."""
    folder, files = maker.folder_of_numbers()
    missing = maker.rng.random() < 0.15
    request = maker.say(
        f"What is in the folder {folder}?",
        f"List {folder}.",
        f"Which files are in {folder}?",
        f"List the files in {folder}",
        f"Show me the files of {folder}.",
    )

    def solve() -> Solver:
        (result,) = yield (list_files(folder),)
        if failed(result):
            return Answer(f"There is no folder {folder}.", (folder, "no folder"))
        return Answer(f"{folder} holds {in_words(listed(result))}.", (folder, *listed(result)))

    return Task("list_one", {maker.path(): "1"} if missing else files, request, solve)


def list_top(maker: Maker) -> Task:
    """The folders at the top."""
    files = {f"{maker.name()}/{maker.file_name()}": "1" for _ in range(maker.rng.randint(1, 4))}
    request = maker.say(
        "Which folders are there?",
        "List the folders.",
        "What is here?",
        "List all.",
        "Show me the workspace.",
    )

    def solve() -> Solver:
        (result,) = yield (list_files("."),)
        folders = [name.rstrip("/") for name in listed(result)]
        return Answer(f"Here is {in_words(folders)}.", tuple(folders))

    return Task("list_top", files, request, solve)


def count_one(maker: Maker) -> Task:
    """How many files a folder has, or lines a file."""
    if maker.rng.random() < 0.5:
        path, files = maker.folder_of_numbers()
        request = maker.say(
            f"How many files are in {path}?",
            f"Count the files in {path}.",
            f"Tell me the number of files in {path}",
        )
    else:
        path = maker.path()
        files = {path: "\n".join(maker.note() for _ in range(maker.rng.randint(1, 20)))}
        request = maker.say(
            f"How many lines are in {path}?", f"Count the lines of {path}.", f"How long is {path}?"
        )
    missing = maker.rng.random() < 0.1

    def solve() -> Solver:
        (result,) = yield (count(path),)
        if failed(result):
            return Answer(f"There is no file {path}.", (path, "no file"))
        counted = result.rpartition(": ")[2]
        return Answer(f"{path} has {counted}.", (path, counted))

    return Task("count_one", {} if missing else files, request, solve)


def search_one(maker: Maker) -> Task:
    """Which files mention a word; or what the one file with the name holds."""
    wanted = maker.word()
    if maker.rng.random() < 0.5:
        paths = [maker.path() for _ in range(maker.rng.randint(0, 3))]
        files = {path: f"{maker.note()} {wanted}" for path in paths} | {maker.path(): "1"}
        request = maker.say(
            f"Which files mention {wanted}?",
            f"Search for {wanted}.",
            f"Where is {wanted} mentioned?",
            f"Find the files that contain {wanted}.",
        )

        def solve() -> Solver:
            (result,) = yield (search(wanted),)
            found = listed(result)
            if not found:
                return Answer(f"No file mentions {wanted}.", ("No file", wanted))
            return Answer(f"{wanted} is in {in_words(found)}.", (wanted, *found))
    else:
        files = {f"{maker.name()}/{wanted}.txt": str(maker.number()), maker.path(): "1"}
        if maker.rng.random() < 0.15:
            del files[next(iter(files))]
        request = maker.say(
            f"Find {wanted} and tell me its number.",
            f"Look for the file {wanted} and read it.",
            f"Find the file named {wanted}. Which number is in it?",
            f"Search for {wanted}, then read what you found.",
        )

        def solve() -> Solver:
            (result,) = yield (search(wanted),)
            if not listed(result):
                return Answer(f"No file mentions {wanted}.", ("No file", wanted))
            path = listed(result)[0]
            (result,) = yield (read_file(path),)
            return Answer(f"{path} holds {page(result)[0]}.", (path, page(result)[0]))

    return Task("search_one", files, request, solve)


def write_one(maker: Maker) -> Task:
    """A file with what the user said."""
    path, text = maker.path(), str(maker.number()) if maker.rng.random() < 0.5 else maker.note()
    request = maker.say(
        f"Write {text} to {path}.",
        f"Put {text} into {path}.",
        f"Save {text} in {path}",
        f"Store {text} in {path}.",
    )

    def solve() -> Solver:
        yield (write_file(path, text),)
        return Answer(f"I wrote {text} to {path}.", (text, path))

    return Task("write_one", {}, request, solve)


def copy_one(maker: Maker) -> Task:
    """The content of one file into another."""
    source, target = maker.path(), maker.path()
    content = str(maker.number()) if maker.rng.random() < 0.7 else maker.note()
    request = maker.say(
        f"Copy the number in {source} to {target}.",
        f"Copy {source} to {target}.",
        f"Read {source} and write it to {target}.",
        f"Put the content of {source} into {target}.",
    )

    def solve() -> Solver:
        (result,) = yield (read_file(source),)
        if failed(result):
            return Answer(f"There is no file {source}.", (source, "no file"))
        content = page(result)[0]
        yield (write_file(target, content),)
        return Answer(f"I wrote {content} to {target}.", (content, target))

    return Task("copy_one", {} if maker.rng.random() < 0.1 else {source: content}, request, solve)


def change_one(maker: Maker) -> Task:
    """A file's number, made larger, smaller or a multiple: read, calculate, write."""
    path, by = maker.path(), maker.number()
    content = maker.note() if maker.rarely() else str(maker.number())
    request, sign = maker.rng.choice(
        (
            (f"Add {by} to the number in {path}.", "+"),
            (f"Make the number in {path} larger by {by}.", "+"),
            (f"Make the number in {path} smaller by {by}.", "-"),
            (f"Multiply the number in {path} by {by} and save it.", "*"),
        )
    )

    def solve() -> Solver:
        (result,) = yield (read_file(path),)
        if failed(result):
            return Answer(f"There is no file {path}.", (path, "no file"))
        (result,) = yield (calculate(f"{page(result)[0]} {sign} {by}"),)
        if failed(result):
            return Answer(NO_NUMBER, (NO_NUMBER,))
        changed = value(result)
        yield (write_file(path, changed),)
        return Answer(f"{path} now holds {changed}.", (path, changed))

    return Task("change_one", {} if maker.rarely() else {path: content}, request, solve)


def read_together(maker: Maker) -> Task:
    """Two to four named files read in one turn, then one calculation over them."""
    folder = maker.name()
    same_folder = maker.rng.random() < 0.5
    how_many = maker.rng.choice((2, 2, 3, 4))
    paths = [f"{folder}/{maker.file_name()}" if same_folder else maker.path() for _ in range(how_many)]
    files = {path: str(maker.number()) for path in paths}
    named = in_words(paths)
    operation, request, naming = maker.rng.choice(
        (
            (
                "+",
                maker.say(f"Add the numbers in {named}.", f"What is the sum of {named}?", f"Add up {named}."),
                "sum",
            ),
            ("+", maker.say(f"What do {named} add up to?", f"Sum the numbers in {named}"), "sum"),
            ("max", f"Which number is the largest in {named}?", "largest number"),
            ("min", f"Which number is the smallest in {named}?", "smallest number"),
            ("max", f"What is the largest of {named}?", "largest number"),
            ("min", f"What is the smallest of {named}?", "smallest number"),
            ("*", f"What is the product of {named}?", "product"),
            ("-", f"Read {paths[0]} and {paths[1]}. What is the difference?", "difference"),
        )
    )
    if operation == "-":
        paths = paths[:2]
    if maker.rarely():
        del files[maker.rng.choice(paths)]

    def solve() -> Solver:
        results = yield tuple(read_file(path) for path in paths)
        for path, result in zip(paths, results, strict=True):
            if failed(result):
                return Answer(f"There is no file {path}.", (path, "no file"))
        values = [page(result)[0] for result in results]
        joined = f"{operation}({', '.join(values)})" if len(operation) > 1 else f" {operation} ".join(values)
        (result,) = yield (calculate(joined),)
        if failed(result):
            return Answer(NO_NUMBER, (NO_NUMBER,))
        return Answer(f"The {naming} is {value(result)}.", (value(result),))

    return Task("read_together", files, request, solve)
