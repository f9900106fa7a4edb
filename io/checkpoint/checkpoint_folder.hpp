// The folder of a run's checkpoints: step_XXXXXXXX.h5, step_XXXXXXXX.h5.partial while one is
// written, step_XXXXXXXX.h5.new while a link is made, step_XXXXXXXX.h5.damaged for what was found
// unsound, best.h5, a link, overtaken_N/ for what a run that went back left behind.  Calls of one
// rank.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "io/files/raw_file.hpp"

namespace ballast {

std::string checkpoint_name(std::int64_t step);
/// Steps with a checkpoint in `dir`, newest first; none where there is no such folder.  Errors: the
/// folder cannot be read.
std::vector<std::int64_t> checkpoint_steps(const std::string& dir);
/// Whether `dir` holds checkpoints that were found unsound.
bool holds_damaged(const std::string& dir);
/// Path of a folder in `dir` with checkpoints of a branch that was left; "" for none.
std::string overtaken(const std::string& dir);
/// Removes what a killed write, or a killed making of a link, left.
void remove_partials(const std::string& dir);
/// Removes all but the newest `keep` files of steps up to `newest`, and at least the one before it:
/// until a step after `newest` succeeded, nobody knows that its state is any good.  That of step
/// `best` stays too (-1: none).
void prune(const std::string& dir, std::int64_t newest, int keep, std::int64_t best = -1);
/// What a user can do where a checkpoint finds no room in `dir`.
SpaceRemedy space_remedy(const std::string& dir);
/// The name of the best checkpoint in its folder: a link to the file of that step.
inline constexpr const char* kBestCheckpoint = "best.h5";
/// Makes it point to the checkpoint of `step`, and returns "" or why that failed: then there is
/// none.
std::string link_best(const std::string& dir, std::int64_t step);
/// Path of the file that it points to.  Errors: there is no link.
std::string best_path(const std::string& dir);
/// Removes the link, where there is one.
void remove_best(const std::string& dir);
struct TakenUp {
  std::string left;      ///< folder of the branch that is left; "": none was
  std::string unlinked;  ///< why `file` is not the newest of the folder; "": it is
};
/// Makes `file`, a checkpoint of `step`, the newest of `dir`, so that what continues there goes on
/// from it again until it has one of its own.  Checkpoints of other steps after it, or all where
/// the file is of another folder, move to a new folder DIR/overtaken_N, the branch that is left,
/// and the best one's link goes where its file does.  A file of `dir` that has the name of another
/// step gets its own; one of any other name or folder is linked to.
TakenUp take_up(const std::string& dir, const std::string& file, std::int64_t step);

}  // namespace ballast
