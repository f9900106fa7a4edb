// The folder of a run's checkpoints: step_XXXXXXXX.h5, step_XXXXXXXX.h5.partial while one is
// written, step_XXXXXXXX.h5.damaged for what was found unsound, best.h5, a link, overtaken_N/ for
// what a run that went back left behind.  Calls of one rank.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ballast {

std::string checkpoint_name(std::int64_t step);
/// Steps with a checkpoint in `dir`, newest first; none where there is no such folder.  Errors: the
/// folder cannot be read.
std::vector<std::int64_t> checkpoint_steps(const std::string& dir);
/// Whether `dir` holds checkpoints that were found unsound.
bool holds_damaged(const std::string& dir);
/// Removes what a killed write left.
void remove_partials(const std::string& dir);
/// Removes all but the newest `keep` files of steps up to `newest`, and at least the one before it:
/// until a step after `newest` succeeded, nobody knows that its state is any good.  That of step
/// `best` stays too (-1: none).
void prune(const std::string& dir, std::int64_t newest, int keep, std::int64_t best = -1);
/// What a user can do where a checkpoint finds no room beside those that prune leaves.
std::string space_remedy(int keep);
/// The name of the best checkpoint in its folder: a link to the file of that step.
inline constexpr const char* kBestCheckpoint = "best.h5";
/// Makes it point to the checkpoint of `step`, and returns "" or why that failed: then there is
/// none.
std::string link_best(const std::string& dir, std::int64_t step);
/// Makes a checkpoint of another folder the newest of this one, by a link: what continues there
/// goes on from it again until it has one of its own.  Returns "" or why that failed.
std::string link_foreign(const std::string& dir, const std::string& file, std::int64_t step);
/// Path of the file that it points to.  Errors: there is no link.
std::string best_path(const std::string& dir);
/// Removes the link, where there is one.
void remove_best(const std::string& dir);
/// Renames a file to NAME.damaged (or NAME.damaged.2 ...) and returns the new name.
std::string set_aside(const std::string& path);
/// Moves every checkpoint of a step after `step` to a new folder DIR/overtaken_N, and returns that
/// folder ("" when there was nothing to move): a run that goes back leaves the branch that it
/// abandons there, so that the newest file is always that of the branch continued last.  The best
/// one's link goes where its file does.
std::string move_overtaken(const std::string& dir, std::int64_t step);

}  // namespace ballast
