"""What the tree promises, as data: which folder may include which, who may call which library, and
how large things may get.  The checks are in checks.py."""

# Rooms of code and what each may include.  Of parallel, io may include the communicators alone.
ROOMS = {
    "core": ["core"],
    "kernels": ["core", "kernels"],
    "parallel": ["core", "kernels", "parallel"],
    "io": ["core", "kernels", "io", "parallel/comm"],
    "app": ["core", "kernels", "parallel", "io", "app"],
}

# Inside a room a folder includes itself and folders of earlier levels only, so no circle can close.
LEVELS = {
    "core": [
        ["core/base"],
        ["core/model", "core/observe"],
        ["core/plan/batch"],
        ["core/plan/batch/rivals"],
        ["core/plan/context", "core/plan/pipeline", "core/data"],
        ["core/plan/attention"],
        ["core/plan"],
        ["core/predict"],
        ["core/config"],
        ["core/search"],
    ],
    "kernels": [
        ["kernels/cuda/runtime"],
        ["kernels/ops"],
        ["kernels/cuda/ops"],
        ["kernels/attention"],
        ["kernels/model"],
        ["kernels/cuda/index"],
        ["kernels/cuda/attention"],
        ["kernels/cuda/standalone"],
    ],
    "parallel": [
        ["parallel/comm"],
        ["parallel/context", "parallel/optimizer"],
        ["parallel/pattern", "parallel/pipeline"],
    ],
    "io": [
        ["io/hdf5", "io/files"],
        ["io/model", "io/checkpoint", "io/data", "io/profile", "io/trace"],
        ["io/deck"],
    ],
    "app": [
        ["app/observe"],
        ["app/plan"],
        ["app/train"],
        ["app/measure"],
        ["app/command"],
    ],
}

# Folders that only some rooms may include.
READERS = {"core/config": ["core/config", "core/search", "app", "io"]}

# Headers of the system, as a pattern, that only the host's compiler reads.
HOST_HEADERS = r"fmt/|spdlog/"

# Libraries by the names of their symbols, and the files (or folders) that call them.
LIBRARIES = {
    "MPI": (r"\bMPI_[A-Z]\w*", ["parallel/comm", "io/checkpoint", "app/command/main.cpp"]),
    "HDF5": (
        r"\bH5[A-Z]+[a-z_]\w*",
        [
            "io/hdf5",
            "io/checkpoint/checkpoint_file.cpp",
            "io/data/dataset_hdf5.cpp",
            "io/profile/profile_file.cpp",
            "io/trace",
        ],
    ),
    "NCCL": (r"\bnccl[A-Z]\w*", ["parallel/comm/nccl_group.cpp"]),
    "CUDA": (r"\bcuda[A-Z]\w*", ["kernels/cuda", "parallel/comm/nccl_group.cpp"]),
}

# The only rooms that read a deck by the name of a key.
DECK_READERS = ["core/config", "io/deck"]

MOST_COLUMNS = 100
MOST_LINES_OF_A_FILE = 600
MOST_LINES_OF_A_FUNCTION = 60

# Files that are tables: one row after another, nothing to split.
TABLES = [
    "core/config/attention_rows.cpp",
    "core/config/batching_rows.cpp",
    "core/config/deck_rows.cpp",
    "core/config/training_rows.cpp",
]

# Sources whose declarations stand elsewhere by nature: `main` has none.
NO_HEADER = ["app/command/main.cpp"]
# Folders whose sources hold one function each, declared in one header.
DECLARED_TOGETHER = {"app/command": "app/command/command_line.hpp"}

# Words that are not ours, and what to write.  A tracked file also cites nothing outside the
# repository: no design notes, no numbered issues, no paths of one machine.
WORDS = {
    r"\b[Ff]orm(s|ed|ing)? again\b": "recompute",
    r"\bDESIGN\b": "the paper or a page of docs/",
    r"\b[Ii]ssue #?\d+": "the reason itself",
    r"(?<![\w.}])/(work|root|home)/\w+": "a relative path",
    r"\bAttentionIndex\b": "AttentionPattern",
}
# Of C++ alone: these words mean something else in prose and figures.
WORDS_OF_CODE = {r"\b[Bb]ars?\b|_bars?\b|\bbars?_": "column"}
SPEAKS_OF_WORDS = [
    "tests/tree/layout.py",
    "tests/tree/exceptions.txt",
    "kernels/cuda/runtime/hopper.cuh",  # bar.sync is an instruction
]

# Formatters change their mind between versions; another version skips its check.
CLANG_FORMAT_VERSION = 14
BLACK_VERSION = 23
