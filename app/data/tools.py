"""Tools of a row and calls of a message in the form that chat templates expect: lists of objects,
which tables hold as text or with every key of every entry."""
import strict_json
from errors import RowError


def tools_of(value):
    """List of the tools of a row, or None.  Errors: RowError of what is none."""
    return objects(value, "tools") or None


def calls_of(message):
    """List of the tool calls of a message; also of the function_call that older chats have."""
    calls = objects(message.get("tool_calls"), "tool_calls")
    if older := objects(message.get("function_call"), "function_call"):
        wrapped = lambda call: (
            call if "function" in call else {"type": "function", "function": call}
        )
        calls = calls or [wrapped(call) for call in older]
    for call in calls:
        named = call["function"] if isinstance(call.get("function"), dict) else call
        if not isinstance(named.get("name"), str):
            raise RowError("a tool call names no function; it has " + ", ".join(map(repr, call)))
    return calls


def objects(value, name):
    """A list of objects, each of which and all of which may be JSON text, and one may stand
    alone."""
    value = unpacked(value, name)
    value = [value] if isinstance(value, dict) else value or []
    if not isinstance(value, list):
        raise RowError(f"{name}: a {type(value).__name__}, not a list of objects")
    made = [unpacked(entry, name) for entry in value]
    if other := [entry for entry in made if not isinstance(entry, dict)]:
        raise RowError(f"{name}: a list with a {type(other[0]).__name__} in it, not of objects")
    return made


def unpacked(value, name):
    """What a text says as JSON; at times it holds another such text."""
    for _ in range(2):
        if not isinstance(value, str):
            return value
        try:
            value = strict_json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise RowError(f"{name}: no JSON: {error}") from error
    return value


def without_nulls(value):
    """The value without the keys that are null, at any depth."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def of_table(row):
    """A row of a table, whose tools and calls have the keys of each other as nulls: the type of a
    column has the keys of all its values."""
    made = {k: without_nulls(v) if k == "tools" else v for k, v in row.items()}
    for name, value in made.items():
        if isinstance(value, list):
            made[name] = [called(entry) for entry in value]
    return made


def called(message):
    if not isinstance(message, dict) or not (message.keys() & {"tool_calls", "function_call"}):
        return message
    names = ("tool_calls", "function_call")
    return {k: without_nulls(v) if k in names else v for k, v in message.items()}
