// Helper of the report's tests: writes traces with the program's own writer and computes
// core/observe/metrics for comparison with Python.
//   report_helper write DIR   reads lines from standard input, fields separated by tabs:
//       session RANK RANKS SEGMENT KEY=NUMBER...   mesh degrees (mesh.dp=2) and coordinates
//       (at.dp=0) of the rank deck RANK TEXT                             of the next session; \n
//       stands for a line break event RANK STEP MICRO_BATCH CHUNK LAYER STAGE OUTER INNER KIND
//       BEGIN END FLOPS BYTES budget RANK STEP LAYER HEAD BUDGET COMPUTED VISIBLE OVERFLOW
//       [KIND]
//       predicted RANK STEP MICRO_BATCH CHUNK STAGE KIND BEGIN END
//       step RANK STEP KEY=VALUE...
//       plan RANK KIND HASH STEP TEXT
//       kill                                       flushes everything and dies as by kill -9
//   report_helper metrics     reads lines "NAME ROWS COLUMNS VALUES... [EXTRA]" and prints one
//   number a line
//   report_helper scalars     prints the scalars of steps whose meaning the writer knows, one a
//   line
#include <csignal>
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "core/observe/metrics.hpp"
#include "io/trace/trace_columns.hpp"
#include "io/trace/trace_writer.hpp"

namespace {

using namespace ballast;

std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> fields;
  std::stringstream stream(line);
  for (std::string field; std::getline(stream, field, '\t');) fields.push_back(field);
  return fields;
}

std::pair<std::string, std::string> pair_of(const std::string& field) {
  const auto at = field.find('=');
  require(at != std::string::npos, "'{}' is no KEY=VALUE", field);
  return {field.substr(0, at), field.substr(at + 1)};
}

EventKind kind_of(const std::string& text) {
  for (int i = 0; i < kEventKinds; ++i)
    if (text == name(static_cast<EventKind>(i))) return static_cast<EventKind>(i);
  fail("'{}' is no event kind", text);
}

/// A backslash and an n stand for a line break.
std::string with_line_breaks(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool line_break = text[i] == '\\' && i + 1 < text.size() && text[i + 1] == 'n';
    out.push_back(line_break ? '\n' : text[i]);
    i += line_break;
  }
  return out;
}

void write(const std::string& dir) {
  std::map<int, std::unique_ptr<TraceWriter>> writers;
  std::map<int, std::string> decks;
  for (std::string line; std::getline(std::cin, line);) {
    const auto f = split(line);
    if (f.empty()) continue;
    if (f[0] == "kill") {
      for (auto& [rank, writer] : writers) writer->flush();
      std::raise(SIGKILL);
    }
    const int rank = std::stoi(f.at(1));
    if (f[0] == "deck") {
      decks[rank] = with_line_breaks(f.at(2));
    } else if (f[0] == "session") {
      TraceHeader header;
      header.rank = rank;
      header.ranks = std::stoi(f.at(2));
      header.segment = std::stoi(f.at(3));
      header.host = "node" + std::to_string(rank / 4);
      header.device = "host";
      header.git_hash = "0123456789ab";
      header.deck = decks[rank];
      for (std::size_t i = 4; i < f.size(); ++i) {
        const auto [key, value] = pair_of(f[i]);
        (key.starts_with("mesh.") ? header.mesh_degrees[key.substr(5)]
                                  : header.coordinates[key.substr(3)]) = std::stoll(value);
      }
      writers[rank].reset();  // closes the session before
      writers[rank] = std::make_unique<TraceWriter>(dir, header);
    } else if (f[0] == "event") {
      Event e;
      std::int32_t* ids[] = {&e.step,  &e.micro_batch, &e.chunk, &e.layer,
                             &e.stage, &e.outer,       &e.inner};
      for (std::size_t i = 0; i < 7; ++i) *ids[i] = std::stoi(f.at(2 + i));
      e.kind = kind_of(f.at(9));
      e.begin_s = std::stod(f.at(10));
      e.end_s = std::stod(f.at(11));
      e.flops = std::stod(f.at(12));
      e.bytes = std::stoll(f.at(13));
      writers.at(rank)->events({&e, 1});
    } else if (f[0] == "predicted") {
      Event e;
      std::int32_t* ids[] = {&e.step, &e.micro_batch, &e.chunk, &e.stage};
      for (std::size_t i = 0; i < 4; ++i) *ids[i] = std::stoi(f.at(2 + i));
      e.kind = kind_of(f.at(6));
      e.begin_s = std::stod(f.at(7));
      e.end_s = std::stod(f.at(8));
      writers.at(rank)->predicted({&e, 1});
    } else if (f[0] == "budget") {
      BudgetRow row;
      row.step = std::stoi(f.at(2));
      row.layer = std::stoi(f.at(3));
      row.head = std::stoi(f.at(4));
      row.budget = std::stod(f.at(5));
      row.computed_pairs = std::stod(f.at(6));
      row.visible_pairs = std::stod(f.at(7));
      row.overflow = std::stoll(f.at(8));
      if (f.size() > 9) row.kind = std::stoi(f[9]);
      writers.at(rank)->budgets({&row, 1});
    } else if (f[0] == "step") {
      StepRow row;
      for (std::size_t i = 3; i < f.size(); ++i)
        row[pair_of(f[i]).first] = std::stod(pair_of(f[i]).second);
      writers.at(rank)->step(std::stoll(f.at(2)), row);
    } else if (f[0] == "plan") {
      writers.at(rank)->plan(f.at(2), std::stoull(f.at(3)), f.at(5), std::stoll(f.at(4)));
    } else {
      fail("unknown line '{}'", line);
    }
  }
}

void metrics() {
  std::cout.precision(17);
  for (std::string line; std::getline(std::cin, line);) {
    std::stringstream in(line);
    std::string name;
    std::size_t rows = 0, columns = 0;
    in >> name >> rows >> columns;
    const auto table = [&] {
      std::vector<std::vector<double>> values(rows, std::vector<double>(columns));
      for (auto& row : values)
        for (double& value : row) in >> value;
      return values;
    };
    const auto values = table();
    double extra = 0;
    if (name == "worker_imbalance")
      std::cout << worker_imbalance(values) << '\n';
    else if (name == "step_imbalance")
      std::cout << step_imbalance(values) << '\n';
    else if (name == "computation_ratio")
      std::cout << computation_ratio(values, table()) << '\n';
    else if (name == "imbalance_degree")
      std::cout << imbalance_degree(values.at(0)) << '\n';
    else if (name == "balance_ratio")
      std::cout << balance_ratio(values.at(0)) << '\n';
    else if (name == "padding_ratio" && in >> extra)
      std::cout << padding_ratio(values.at(0), extra) << '\n';
    else if (name == "pop" && in >> extra) {
      const Pop p = pop(values.at(0), extra);
      std::cout << p.load_balance << ' ' << p.communication_efficiency << ' '
                << p.parallel_efficiency << '\n';
    } else if (name == "exclusive_seconds") {  // rows of begin and end
      std::vector<Event> events(rows);
      for (std::size_t i = 0; i < rows; ++i) {
        events[i].begin_s = values[i].at(0);
        events[i].end_s = values[i].at(1);
      }
      for (const double s : exclusive_seconds(events)) std::cout << s << ' ';
      std::cout << '\n';
    } else if (name == "useful") {
      for (int k = 0; k < kEventKinds; ++k)
        if (useful(static_cast<EventKind>(k)))
          std::cout << ballast::name(static_cast<EventKind>(k)) << ' ';
      std::cout << '\n';
    } else {
      fail("unknown metric '{}'", name);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  try {
    if (command == "write" && argc == 3)
      write(argv[2]);
    else if (command == "metrics")
      metrics();
    else if (command == "scalars")
      for (const NameMeaning& scalar : step_scalars()) std::cout << scalar.name << '\n';
    else
      fail("usage: report_helper write DIR | metrics | scalars");
  } catch (const std::exception& e) {
    std::fprintf(stderr, "report_helper: %s\n", e.what());
    return 1;
  }
  return 0;
}
