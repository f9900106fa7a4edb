"""The kinds of trials by name: the trial, how many a full pass has and how many the short form."""
from mesh_trials import mesh_change, pairs
from process_trials import kill, stall, start_end, stop
from storage_trials import damage, fault, fault_plan, full_disk, spoil, spoil_plan

TRIALS = {
    "kill": (kill, 150, 3),  # two kills each
    "stall": (stall, 150, 2),
    "start_end": (start_end, 40, 2),
    "stop": (stop, 60, 3),
    "fault": (fault, lambda: len(fault_plan()), 5),
    "spoil": (spoil, lambda: len(spoil_plan()), 3),
    "damage": (damage, 100, 3),
    "full_disk": (full_disk, 20, 2),
    "mesh_change": (mesh_change, lambda: len(pairs()), 2),
}
try:
    from input_trials import HOSTILE, bad_input, damaged_input, hostile

    TRIALS |= {
        "hostile": (hostile, lambda: len(HOSTILE), 5),
        "damaged_input": (damaged_input, 50, 1),  # 12 files each, through the program
        "bad_input": (bad_input, 125, 5),  # 40 files each, through the parsers in one process
    }
except ImportError as problem:
    print(f"no trials of inputs: {problem}")
