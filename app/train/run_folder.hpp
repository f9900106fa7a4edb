// Run folder: the fixed layout of one run's outputs, locked while in use.
//   deck.toml  log.txt  status.json  trace/  indexes/  checkpoints/  report/  lock
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "io/files/raw_file.hpp"
#include "parallel/comm/comm.hpp"

namespace ballast {

class RunFolder {
 public:
  /// Collective.  Creates and locks `path` (rank 0 holds the lock until the object goes; where the
  /// file system has no locks, a warning says so).  Throws Error on every rank when another run
  /// holds it, when it cannot be written, or when it already holds a run and `resume` is false.
  RunFolder(const Communicator& world, const std::string& path, bool resume);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  /// Whether no other folder stands in this one's place, and no other run holds it; a lock file
  /// that somebody removed is made again.  True where that cannot be told, as on ranks that hold no
  /// lock.
  bool stands();

  /// Writes deck.toml, the run's effective deck, in place of an earlier session's.  Returns why it
  /// cannot, or "".
  std::string write_deck(const std::string& text) const;

  /// Writes status.json for scripts that watch the run: `state` running, finished, stopped
  /// (continue it) or failed, the step, the newest sound checkpoint, and why.  Where no new file
  /// can be written, the old one is overwritten in place, and where that fails too it goes, at the
  /// cost of a warning.  The rank that holds the lock writes.
  void write_status(const std::string& state, std::int64_t step, const std::string& checkpoint,
                    const std::string& why = "");

  /// The word `failed` of a rank that ends the run alone, or of a start that is refused, unless
  /// this session has left it.  Without a checkpoint step and checkpoint stay those that the file
  /// names.
  void leave_word(std::int64_t step, const std::string& checkpoint, const std::string& why) const;

  const std::string& path() const { return path_; }
  std::string checkpoints() const { return path_ + "/checkpoints"; }
  std::string trace() const { return path_ + "/trace"; }
  std::string log() const { return path_ + "/log.txt"; }
  std::string json_lines() const { return path_ + "/steps.jsonl"; }
  std::string tensorboard() const { return path_ + "/tensorboard"; }
  std::string indexes() const { return path_ + "/indexes"; }
  std::string deck() const { return path_ + "/deck.toml"; }

 private:
  bool write(const std::string& state, std::int64_t step, const std::string& checkpoint,
             const std::string& why) const;
  std::string status_file() const { return path_ + "/status.json"; }

  std::string path_;
  int rank_, lock_ = -1;
  std::optional<FilePlace> place_;  ///< unknown to a rank that does not see a fresh folder at once
  std::string status_before_;       ///< what an earlier session left in status.json
  bool warned_ = false;             ///< that status.json cannot be written
};

}  // namespace ballast
