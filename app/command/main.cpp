// ballast: parses the command line, starts MPI and Kokkos for the commands that run on ranks, and
// turns every error into a message and a status.
#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "app/command/command_line.hpp"
#include "app/observe/json_output.hpp"
#include "io/hdf5/hdf5_support.hpp"
#include "parallel/comm/library_watch.hpp"
#include "parallel/comm/signals.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace {

/// Seconds that MPI may take to start.  Ranks read the deck only after that, so the command line
/// and the default count alone.
double start_limit_s(const CommandLine& line) {
  constexpr std::string_view kKey = "run.hang_timeout_s=";
  double limit_s = RunConfig{}.hang_timeout_s;
  for (const std::string& text : line.overrides)
    if (text.starts_with(kKey)) {
      std::string digits = text.substr(kKey.size());
      std::erase(digits, '_');  // TOML's 1_000
      if (const double stated = std::atof(digits.c_str()); stated > 0)
        limit_s = std::min(stated, kMostSeconds);
    }
  return limit_s;
}

/// Why --json cannot be written, or would replace a file that the command line names; or "".
std::string twin_problem(const CommandLine& line) {
  if (line.json.empty()) return "";
  const auto path = [](const std::string& file) { return std::filesystem::weakly_canonical(file); };
  for (const auto& [file, what] : {std::pair{line.deck_file, "the deck"},
                                   {line.restart == "latest" ? "" : line.restart, "the checkpoint"},
                                   {line.checkpoint, "the checkpoint"},
                                   {line.tune.write, "what --write names"}})
    if (!file.empty() && path(file) == path(line.json))
      return fmt::format("--json {}: this is {}; choose another name", line.json, what);
  return json_problem(line.json);
}

/// What an error says, or where it came of standard output, that.
std::string words(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr)
    return "no host memory is left for the plan or data of this deck: use shorter samples, larger "
           "chunks or micro-batches (fewer of them a step), or a higher limit (ulimit -v)";
  if (!std::ferror(stdout)) return error.what();
  return fmt::format("standard output cannot be written ({})", error.what());
}

/// The status of a command that ended with `status`: not 0 where what it printed is lost.  Whoever
/// closes a pipe has read enough; a training's lines are in its log as well.
int said(const Command& command, int status) {
  errno = 0;
  if (launched_rank() != 0 || (std::fflush(stdout) == 0 && !std::ferror(stdout))) return status;
  if (errno == EPIPE) return status;
  std::fprintf(stderr, "ballast: standard output cannot be written%s%s\n", errno ? ": " : "",
               errno ? std::strerror(errno) : "");
  return status == 0 && std::string_view(command.name) != "train" ? 1 : status;
}

int run_plain(const Command& command, const CommandLine& line) {
  if (launched_rank() != 0) return 0;  // one process says it all
  try {
    hdf5::start();
    const std::string unwritable = twin_problem(line);
    require(unwritable.empty(), "{}", unwritable);
    return said(command, command.run(line));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "ballast: %s\n", words(e).c_str());
    return 1;
  }
}

/// One rank's own error, caught by nobody: it ends the others too.  This runs before the stack
/// goes, whose destructors might wait for the other ranks.
[[noreturn]] void end_all() {
  try {
    if (const std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const std::exception& e) {
    fail_here(words(e));
  } catch (...) {
  }
  fail_here("an exception of unknown type");
}

/// An error that all ranks share is printed by rank 0, and all leave.  Any other is left to
/// end_all.
int run_on_ranks(const Command& command, const CommandLine& line) {
  std::set_terminate(end_all);
  try {
    const Communicator world = Communicator::world();
    const std::string unwritable = world.rank() == 0 ? twin_problem(line) : "";
    check_all(world, unwritable.empty(), unwritable);
    return said(command, command.run(line));
  } catch (const CollectiveError& e) {
    if (Communicator::world().rank() == 0) std::fprintf(stderr, "ballast: %s\n", e.what());
    return 1;
  }
}

int start_ranks(const Command& command, const CommandLine& line, std::vector<char*>& kokkos) {
  int argc = static_cast<int>(kokkos.size()) - 1;
  char** argv = kokkos.data();
  if (std::string(command.name) == "train") catch_stop_signals();
  hdf5::start();
  start_mpi(&argc, &argv, start_limit_s(line));
  set_wait_limit(start_limit_s(line));  // until the deck is read
  int status = 1;
  std::optional<Kokkos::ScopeGuard> scope;
  try {
    scope.emplace(argc, argv);
  } catch (const std::exception& e) {
    if (launched_rank() == 0)
      std::fprintf(stderr,
                   "ballast: Kokkos does not start: %s; look at the KOKKOS_* variables of the "
                   "environment and at --kokkos-* options\n",
                   e.what());
  }
  if (scope) status = run_on_ranks(command, line);
  scope.reset();
  // Ranks that wait for a core are slow, not stuck.
  const double limit_s = std::clamp(wait_limit(), 30.0, 60.0);
  end_mpi(status, limit_s);
  watch_exit(status, limit_s);
  return status;
}

}  // namespace
}  // namespace ballast

int main(int argc, char** argv) {
  using namespace ballast;
  // A file that meets the limit of its size fails as on a full disk, with a message.
  std::signal(SIGXFSZ, SIG_IGN);
  // Nor does a run end where nobody reads its lines any more (| head).
  std::signal(SIGPIPE, SIG_IGN);
  std::vector<std::string> arguments;
  std::vector<char*> kokkos{argv[0]};
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]).starts_with("--kokkos-"))
      kokkos.push_back(argv[i]);
    else
      arguments.emplace_back(argv[i]);
  }
  kokkos.push_back(nullptr);
  ParsedLine parsed;
  try {
    parsed = parse_command_line(arguments);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "ballast: %s\n", e.what());
    return 1;
  }
  if (!parsed.line) {
    if (launched_rank() == 0) std::fputs(parsed.text.c_str(), parsed.status == 0 ? stdout : stderr);
    return parsed.status;
  }
  for (const Command& command : commands())
    if (parsed.line->command == command.name)
      return command.ranks ? start_ranks(command, *parsed.line, kokkos)
                           : run_plain(command, *parsed.line);
  return 1;
}
