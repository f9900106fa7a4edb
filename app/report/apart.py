"""Calls in a process of their own, for libraries that may bring their process down."""
import multiprocessing
import pickle
import signal
from dataclasses import dataclass


@dataclass
class Death:
    """Stands for a result, where the process died of the call."""

    reason: str


def each(function, items):
    """Yields (item, function(item)) in order, or (item, Death).  One forked process makes the
    calls, so what they leave in globals stays there; another goes on after one that dies."""
    items = list(items)
    context = multiprocessing.get_context("fork")
    done = 0
    while done < len(items):
        results, sender = context.Pipe(duplex=False)
        child = context.Process(target=_call, args=(function, items[done:], sender), daemon=True)
        child.start()
        sender.close()  # only the child's end is open: its death is the end of the pipe
        try:
            for item in items[done:]:
                result = pickle.loads(results.recv_bytes())
                done += 1
                yield item, result
        except EOFError:
            child.join()
            done += 1
            yield item, Death(_reason(child.exitcode))
        finally:
            child.terminate()  # where the caller wants no more
            child.join()
            results.close()


def _call(function, items, sender):
    for item in items:
        sender.send_bytes(pickle.dumps(function(item), protocol=pickle.HIGHEST_PROTOCOL))


def _reason(status):
    return signal.Signals(-status).name if status < 0 else f"status {status}"
