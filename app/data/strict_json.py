"""JSON of rows.  An object that has a key twice is refused: one of both values would be lost."""
import json


class RepeatedKey(ValueError):
    pass


def with_each_key_once(pairs):
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RepeatedKey(f"the key {twice!r} stands twice in one object; leave one of both out")
    return made


# Made once: json.loads would make a decoder for every row.
loads = json.JSONDecoder(object_pairs_hook=with_each_key_once).decode
