#include "io/checkpoint/checkpoint_folder.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>
#include <utility>

#include "core/base/error.hpp"

namespace ballast {
namespace fs = std::filesystem;
namespace {

constexpr const char* kPartial = ".partial";
constexpr const char* kFresh = ".new";  ///< a link until it replaces another
constexpr const char* kOvertaken = "overtaken_";

/// Step of a checkpoint's file name, or nothing for any other name.
std::optional<std::int64_t> step_of(const std::string& name) {
  std::int64_t step = 0;
  if (name.compare(0, 5, "step_") != 0) return std::nullopt;
  std::from_chars(name.data() + 5, name.data() + name.size(), step);
  return checkpoint_name(step) == name ? std::optional(step) : std::nullopt;
}

/// Names in `dir`; none where there is no such folder.
std::vector<std::string> names_of(const std::string& dir) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entry(dir, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error))
    names.push_back(entry->path().filename().string());
  require(!error || error == std::errc::no_such_file_or_directory,
          "checkpoint folder {} cannot be read: {}", dir, error.message());
  return names;
}

/// `name` with its ending, if it is one that follows a checkpoint's name.
bool follows_checkpoint(const std::string& name, const char* ending) {
  const std::size_t at = name.find(ending);
  return at != std::string::npos && step_of(name.substr(0, at)).has_value();
}

}  // namespace

std::string checkpoint_name(std::int64_t step) { return fmt::format("step_{:08}.h5", step); }

std::vector<std::int64_t> checkpoint_steps(const std::string& dir) {
  std::vector<std::int64_t> steps;
  for (const std::string& name : names_of(dir))
    if (const auto step = step_of(name)) steps.push_back(*step);
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

bool holds_damaged(const std::string& dir) {
  const auto names = names_of(dir);
  return std::any_of(names.begin(), names.end(),
                     [](const std::string& n) { return follows_checkpoint(n, kDamaged); });
}

std::string overtaken(const std::string& dir) {
  for (const std::string& name : names_of(dir))
    if (const std::string folder = dir + "/" + name;
        name.starts_with(kOvertaken) && !checkpoint_steps(folder).empty())
      return folder;
  return "";
}

void remove_partials(const std::string& dir) {
  for (const std::string& name : names_of(dir))
    for (const char* ending : {kPartial, kFresh})
      if (name.ends_with(ending) && follows_checkpoint(name, ending)) fs::remove(dir + "/" + name);
}

void prune(const std::string& dir, std::int64_t newest, int keep, std::int64_t best) {
  int kept = 0;
  for (std::int64_t step : checkpoint_steps(dir)) {
    std::error_code ignored;
    if (step <= newest && ++kept > std::max(keep, 2) && step != best)
      fs::remove(dir + "/" + checkpoint_name(step), ignored);
  }
}

SpaceRemedy space_remedy(const std::string& dir) {
  const bool old = checkpoint_steps(dir).size() > 2;
  const std::string stay = "; the checkpoints there stay until this one is whole";
  return {
      old ? "free some space (delete the oldest checkpoints there, not that of best.h5: a run "
            "needs no more than two, checkpoint.keep), or name another run folder (-d)"
          : "free some space, or name another run folder (-d)" + stay,
      "raise the limit of a file's size (ulimit -f), or name a run folder (-d) on a file system "
      "that holds such files" +
          stay};
}

namespace {

/// Makes room by `clear` and replaces `link` by one to `target`, which is made first under another
/// name; returns "" or why that failed, and leaves none then.
std::string link_to(
    const fs::path& target, const std::string& link, const std::function<void()>& clear = [] {}) {
  const std::string fresh = link + kFresh;
  std::error_code error, ignored;
  fs::remove(fresh, ignored);
  fs::create_symlink(target, fresh, error);
  clear();
  if (!error) fs::rename(fresh, link, error);
  if (!error) return "";
  fs::remove(fresh, ignored);
  fs::remove(link, ignored);
  return fmt::format("{} cannot be made: {}", link, error.message());
}

}  // namespace

std::string link_best(const std::string& dir, std::int64_t step) {
  return link_to(checkpoint_name(step), dir + "/" + kBestCheckpoint);
}

std::string best_path(const std::string& dir) {
  std::error_code error;
  const fs::path target = fs::read_symlink(dir + "/" + kBestCheckpoint, error);
  require(!error, "{} has no best checkpoint; checkpoint.best = true keeps one", dir);
  return dir + "/" + target.filename().string();
}

void remove_best(const std::string& dir) {
  std::error_code ignored;
  fs::remove(dir + "/" + kBestCheckpoint, ignored);
}

namespace {

/// Moves every checkpoint of a step after `step`; returns the folder, "" when none was moved.
std::string move_overtaken(const std::string& dir, std::int64_t step) {
  std::string folder;
  for (std::int64_t later : checkpoint_steps(dir)) {
    if (later <= step) continue;
    for (int i = 1; folder.empty(); ++i)
      if (const std::string name = fmt::format("{}/{}{}", dir, kOvertaken, i); !fs::exists(name))
        fs::create_directory(folder = name);
    fs::rename(dir + "/" + checkpoint_name(later), folder + "/" + checkpoint_name(later));
  }
  std::error_code ignored;
  if (!fs::exists(dir + "/" + kBestCheckpoint, ignored)) remove_best(dir);  // its file was moved
  if (!folder.empty()) sync_directory(dir);
  return folder;
}

/// Name in `dir` of the file that `path` is or links to; "" where it lies elsewhere.
std::string name_in(const std::string& dir, const fs::path& path) {
  std::error_code ignored;
  for (const fs::path& file : {fs::canonical(path, ignored), fs::absolute(path, ignored)})
    if (fs::equivalent(file.parent_path(), dir, ignored)) return file.filename().string();
  return "";
}

}  // namespace

TakenUp take_up(const std::string& dir, const std::string& file, std::int64_t step) {
  std::error_code error;
  const std::string own = name_in(dir, file), name = checkpoint_name(step);
  const fs::path link = dir + "/" + name, target = fs::canonical(file, error);
  if (own == name) return {move_overtaken(dir, step), ""};
  TakenUp taken;
  const auto leave = [&] { taken.left = move_overtaken(dir, own.empty() ? -1 : step - 1); };
  if (step_of(own)) {  // pruning goes by names
    leave();
    fs::rename((fs::exists(dir + "/" + own) ? dir : taken.left) + "/" + own, link, error);
    if (error)
      taken.unlinked = fmt::format("{} cannot be made: {}", link.string(), error.message());
    else if (!taken.left.empty() && checkpoint_steps(taken.left).empty())
      fs::remove(std::exchange(taken.left, ""), error);  // it was moved there alone
    return taken;
  }
  fs::create_directories(dir, error);
  taken.unlinked = link_to(target, link, leave);
  return taken;
}

}  // namespace ballast
