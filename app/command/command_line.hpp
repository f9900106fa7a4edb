// Command line: `ballast COMMAND ...` parsed, and the table of commands that main dispatches on.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/config/config.hpp"
#include "core/config/deck_rules.hpp"
#include "parallel/comm/comm.hpp"

namespace ballast {

/// What `ballast tune` takes beside its deck.
struct TuneLine {
  std::int64_t ranks = 0;   ///< 0: those of the deck's mesh
  double memory_gib = 0;    ///< of a rank; 0: no limit
  double coverage = 0;      ///< least mean coverage of a sparse budget; 0: the budget stays
  std::int64_t steps = 4;   ///< that the best plans are simulated over
  std::int64_t list = 10;   ///< plans to show
  std::int64_t trials = 0;  ///< plans to simulate at most; 0: what half a minute allows
  std::string write;        ///< deck of the best plan, or ""
  bool overwrite = false;
};

struct CommandLine {
  std::string command;                 ///< train, check ...
  std::string name;                    ///< bench: what is measured
  std::string deck_file;               ///< bench: "" without one
  std::vector<std::string> overrides;  ///< block.key=value
  std::string case_name;               ///< --case, or ""
  std::string restart;                 ///< -r: a checkpoint file, "latest", "best", or ""
  bool force_model = false;            ///< continue a checkpoint of another block model
  std::string output;                  ///< -d, or ""
  std::string checkpoint, folder;      ///< export: from where, to where
  bool adapter = false;                ///< export: the adapters alone
  std::string dtype = "bf16";          ///< export: bf16 or f32
  std::string json;                    ///< --json, or "": no twin
  bool elsewhere = false;              ///< check: files that are not here are no problem
  bool compare = false;                ///< pack: other placements of the same samples beside it
  std::int64_t plans = 1;              ///< --plans: steps whose plans the twin holds
  TuneLine tune;
  std::int64_t steps = 1;  ///< check --steps: steps that are simulated
  std::string trace;       ///< check --trace: folder for them, or ""
  double wall_time_s = 0;  ///< -t in seconds; 0: no limit

  /// The chosen deck as a Config, the same on every rank: rank 0 reads the file and hands its text
  /// to the others.  Collective; throws CollectiveError with all problems.
  Config config(const Communicator& world, DeckNeeds needs = {}) const;
  /// For commands without ranks: the decks to handle, one a case (the one of --case, or the base
  /// deck when there is no list).
  std::vector<Config> configs(DeckNeeds needs) const;
  /// -d, else run.output, else runs/NAME of the deck file (and case).
  std::string output_folder(const Config& config) const;
};

/// Notes on the standard error about keys that change nothing in any of the cases.
void tell_deck_notes(std::span<const Config> cases);

/// One subcommand.  `ranks`: MPI and Kokkos are up when it runs; otherwise it is a plain process.
struct Command {
  const char* name;
  const char* meaning;
  bool ranks;
  int (*run)(const CommandLine&);
};
std::span<const Command> commands();

// Bodies, each in the file of its name; the result is the exit status.
int train_command(const CommandLine& line);
int eval_command(const CommandLine& line);
int check_command(const CommandLine& line);
int pack_command(const CommandLine& line);
int profile_command(const CommandLine& line);
int plan_command(const CommandLine& line);
int tune_command(const CommandLine& line);
int reference_command(const CommandLine& line);
int export_command(const CommandLine& line);
int bench_command(const CommandLine& line);

/// What parsing came to: a command to run, or a text to print and a status to leave with (help and
/// version 0, bad usage 2).
struct ParsedLine {
  std::optional<CommandLine> line;
  std::string text;
  int status = 0;
};
/// `arguments` without the program's name and without --kokkos-*.
ParsedLine parse_command_line(const std::vector<std::string>& arguments);

/// HH:MM:SS or D-HH:MM:SS in seconds.  Throws Error for anything else.
double parse_wall_time(const std::string& text);

/// What `ballast --version` prints.
std::string version_text();

}  // namespace ballast
