// Texts that the model writes at evaluations: prompts continued token by token on the ranks' own
// sharded model, whatever the mesh.  Nothing is cached: every token is a forward pass over all
// prompts and what was written so far.
#pragma once
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "app/train/session.hpp"
#include "app/train/step_planner.hpp"

namespace ballast {

/// A prompt and what the model wrote after it.
struct GeneratedText {
  std::int64_t sample = -1;  ///< held-out sample whose beginning is the prompt; -1: the deck's text
  std::vector<std::int32_t> prompt, tokens;
  bool stopped = false;  ///< by eval.generate_stop_token, which is not among the tokens
  bool bytes = false;    ///< tokens are bytes, so that they are text
  /// {"sample", "prompt", "tokens", "stopped"} and of bytes "prompt_text" and "text", with what is
  /// no UTF-8 replaced; a sample's number only where it is one.
  nlohmann::ordered_json json() const;
};

nlohmann::ordered_json generated_json(const std::vector<GeneratedText>& texts);
/// For the log: a line a text, of bytes quoted, else numbers of tokens and the first of them.
std::vector<std::string> generated_lines(const std::vector<GeneratedText>& texts);

/// The token after a position whose logits are `logits`: the most likely one, the lowest of equals
/// (temperature 0), or drawn from softmax(logits / temperature) by `uniform` in [0, 1).
std::int32_t next_token(const std::vector<double>& logits, double temperature, double uniform);

class Generator {
 public:
  /// What block eval asks for; session and planner must outlive it.  Collective.  Errors, on every
  /// rank: texts for data that is not of bytes, no held-out samples to begin, lengths that no
  /// micro-batch holds.
  Generator(Session& session, StepPlanner& planner);
  /// Whether the deck asks for any.
  static bool wanted(const Config& config) { return config.eval.generate.tokens > 0; }
  /// Tokens of all forward passes of run(), where no text stops early.
  std::int64_t tokens() const;
  /// With the present weights.  Collective; the same on every rank.
  std::vector<GeneratedText> run();

 private:
  void add_samples();
  StepPlan plan(const std::vector<std::vector<std::int32_t>>& sequences);
  /// The next token of each sequence; `live`: the prompt that each continues.
  std::vector<std::int32_t> next(const std::vector<std::vector<std::int32_t>>& sequences,
                                 const std::vector<std::size_t>& live);

  Session& session_;
  StepPlanner& planner_;
  GenerateConfig options_;
  std::vector<GeneratedText> prompts_;
};

}  // namespace ballast
