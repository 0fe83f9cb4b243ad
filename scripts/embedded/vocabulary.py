"""The words of the embedded model, and the tokenizer made from them.

Knows which strings are one token each. Knows nothing of tasks, tools or training.

Strategy: copying must be plain induction, so a word has to be the same single token wherever it
stands: at the start of a line, after "/", after a quote, after a space. Text is therefore split
first (words, single digits, punctuation with the blank that follows it) and a piece that is in the
vocabulary is taken whole, without merges (`ignore_merges`). All other text falls back to byte
pairs, so every string round-trips.
"""

import json
import re
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY_SIZE = 1024


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>", "<custom_call>", "</custom_call>"),
    *(f"<|reserved_{i}|>" for i in range(16)),
)
PAD_TOKEN = "<|endoftext|>"
END_TOKEN = "<|im_end|>"

FOLDER_AND_FILE_WORDS = _words("""
acorn alder amber anchor apple apron arch arrow ash aspen atlas attic autumn badge baker balcony bamboo
barley barn basil basket bay beach beacon bean bear beech bell berry birch bird blanket bloom blossom boat
book bottle bowl branch brass bread brick bridge brook broom brush bucket button cabin cabinet candle canvas
canyon cape caravan carpet castle cave cedar cellar chalk cherry chestnut chimney cider clay cliff clock
cloud clover coal coast cobalt comet compass copper coral cork corner cotton cove crane creek crystal cup
curtain daisy dale dawn desk dew dock dove drawer drum dune eagle east echo elm ember fable falcon feather
fern ferry field fig finch fjord flame flax flint flute forest fountain fox frost galaxy garden garlic
garnet gate ginger glacier glass glove gold granite grape grass gravel grove gull hammer harbor harp hazel
heather hedge heron hill hive honey horn iris iron island ivory ivy jade jar jasmine jetty juniper kettle
kiln kitchen kite ladder lagoon lake lamp lantern lark laurel lavender leaf ledge lemon lichen lily linen
lodge loft loom lotus lynx magnet maple marble market marsh meadow melon mill mint mirror mist moon moor
moss mountain museum needle nest north nutmeg oak oasis ocean olive onyx opal orchard orchid otter owl
paddle palm paper peach pearl pebble pepper pier pillow pine planet plum pollen pond poplar poppy porch
prairie quail quarry quartz quill rain raven reef resin ribbon ridge river robin rope rose ruby sage sail
salt sand satin school seed shell shore silk silver slate smoke snow sparrow spring spruce star stone storm
stream studio sugar summer sun swan table temple thistle thyme tide timber tower trail tulip tunnel valley
velvet violet wagon walnut water wave west wheat willow wind window winter wood wool yard
""")

TOOL_WORDS = _words("""
list_files read_file search count write_file calculate folder path text expression function parameters
description name arguments type object string properties required additionalProperties false true Tools Call
tool tools with system user assistant next none end see error no such file files lines line wrote max min
not
""")

ENGLISH_WORDS = _words("""
the The of and And to To in In is Is a A that it It for For on with as are Are was be this This have from
From at by or an all you You I we We they he she has but can Can will do Do if there There their what What
which Which when When who Who how How many much about up out one two three four then Then them these some so
time more only my me your its into than now no No yes Yes please Please tell Tell show Show give Give read
Read find Find add Add sum Sum total Total largest Largest smallest Smallest number numbers number value
values write Write save Save copy Copy put Put result results answer holds contains mentions says store
content contents first second last each every after before follow Follow start Start stops ends plus minus
times product difference between both most least highest lowest biggest hello Hello hi Hi hey Hey thanks
Thanks thank Thank good Good morning welcome help Help work sorry Sorry cannot found under inside called
named where Where look Look through go Go know need want like would could should may also just other new
over any our us use make made way people day get here out him his her had were been being did does well very
great long little own right old see same another because while world life still must high too even here
again small large big Count count report Report note record check Check list List together double compute
Compute nothing empty missing written reads left open trail chain same greater larger smaller
""")

PUNCTUATION_PIECES = (
    *('": "', '", "', '"}}', '": ', '{"', '"}', '", ', '"', '"]', '["', "{}", "}}"),
    *('": {"', '"},', '"}, "', '": ["', '"], "', '"}}, "', '": {}', '": []', "}}}"),
    *(": ", ", ", ". ", "? ", "! ", "; ", "+ ", "- ", "* ", "/ ", "= ", "(", "((", ") ", "))", ").", ")."),
    *("...", "--", "->", "://", "# ", "## ", "<|", "|>", "</", "/>", "==", "!=", "'s"),
    *(".txt", ".md", ".log", ".csv", ".json", ".py"),
    *("\n\n", "  ", "    ", "\n\n\n"),
)

DEFINITION_PIECES = (
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "string"}, "',
    '": {"type": "string"}}, "required": ["',
    '"], "additionalProperties": false}}}',
    '{"name": "',
    '", "arguments": {"',
)
"""What tool definitions and calls are made of; whole pieces, because every conversation pays for them."""

WORD = r"[A-Za-z]+(?:_[A-Za-z]+)*"
"""A word; names joined by "_" are one piece, so a tool's name is one token."""

EXTENSION = r"\.[a-z]{2,4}(?![A-Za-z])"

SPLIT_PATTERN = "|".join(
    [
        *(re.escape(piece) for piece in DEFINITION_PIECES),
        WORD,
        r"[0-9]",
        EXTENSION,
        r'[\{\}\[\]"]+(?:[:,] ?)?[\{\["]*',  # JSON that opens, closes, or stands between two members
        r'[^\sA-Za-z0-9"\{\}\[\]]+ ?',  # other punctuation, with the blank that follows it
        r"\n+",
        r"[^\S\n]+",
    ]
)

MERGE_PRACTICE = _words("""
ing ed er ers ly tion tions ment ness able ible est ous ful less ity ive al ic ent ant ence ance ate ize age
ary ory th he in er an re on at en nd ti es or te of st ar ou it le ve me de hi ri ro co ne ra ma se li ch
sh wh ph qu ck ll ss ee oo ea ai ay oy ow aw ew igh ight ould pre pro con com dis un over under inter sub
trans ex per for able port form stand
""")


def _byte_characters() -> dict[int, str]:
    """The printable stand-in of each byte, as byte-level BPE defines it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in stand_ins:
            stand_ins[byte] = chr(256 + len(stand_ins) - len(printable))
    return stand_ins


def _learned_merges(already: set[str], wanted: int) -> list[tuple[str, str]]:
    """Merges that shorten unknown words, learned from common letter groups and the words.

    They make `wanted` new tokens; a merge whose product is a token already costs nothing.
    """
    practice = (*MERGE_PRACTICE, *MERGE_PRACTICE, *ENGLISH_WORDS, *FOLDER_AND_FILE_WORDS)
    pieces = [list(word) for word in practice]
    merges: list[tuple[str, str]] = []
    known = set(already)
    while wanted:
        frequency: dict[tuple[str, str], int] = {}
        for piece in pieces:
            for pair in pairwise(piece):
                frequency[pair] = frequency.get(pair, 0) + 1
        pair = max(frequency, key=lambda candidate: (frequency[candidate], candidate))
        merges.append(pair)
        if "".join(pair) not in known:
            known.add("".join(pair))
            wanted -= 1
        for piece in pieces:
            at = 0
            while at < len(piece) - 1:
                if (piece[at], piece[at + 1]) == pair:
                    piece[at : at + 2] = ["".join(pair)]
                at += 1
    return merges


def build_tokenizer() -> Tokenizer:
    """The tokenizer: byte-level BPE of exactly `VOCABULARY_SIZE` tokens, specials included."""
    stand_ins = _byte_characters()

    def spell(text: str) -> str:
        return "".join(stand_ins[byte] for byte in text.encode())

    words = (*TOOL_WORDS, *FOLDER_AND_FILE_WORDS, *ENGLISH_WORDS)
    whole = [spell(piece) for piece in (*words, *PUNCTUATION_PIECES, *DEFINITION_PIECES)]
    tokens = list(dict.fromkeys([*SPECIAL_TOKENS, *stand_ins.values(), *whole]))
    merges = _learned_merges(set(tokens), VOCABULARY_SIZE - len(tokens))
    tokens = list(dict.fromkeys([*tokens, *("".join(pair) for pair in merges)]))
    vocabulary = {token: i for i, token in enumerate(tokens)}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(specials)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise AssertionError(f"vocabulary has {tokenizer.get_vocab_size()} tokens, not {VOCABULARY_SIZE}")
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token; KeyError if it is none."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def save_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json into `folder`."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    roles = {"eos_token": END_TOKEN, "pad_token": PAD_TOKEN}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **roles,
        "bos_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(roles, indent=2) + "\n")
