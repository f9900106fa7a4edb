// Datasets in files of a format: `megatron` and `hdf5`, sound and damaged.
#include <array>
#include <chrono>
#include <cstring>
#include <random>

#include "core/base/error.hpp"
#include "core/plan/batch/chunking.hpp"
#include "io/data/dataset.hpp"
#include "io/hdf5/hdf5_support.hpp"
#include "tests/io/temporary_folder.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

namespace fs = std::filesystem;

using Documents = std::vector<std::vector<std::int64_t>>;

Documents random_documents(std::mt19937_64& random, std::int64_t count, std::int64_t vocabulary) {
  Documents documents(static_cast<std::size_t>(count));
  for (auto& d : documents) {
    d.resize(1 + random() % 60);
    for (auto& token : d)
      token = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(vocabulary));
  }
  return documents;
}

template <class T>
void put(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

/// An indexed dataset written byte by byte from the format's description; documents are cut into
/// sequences at random.
struct Indexed {
  std::string idx, bin;
  Indexed(const Documents& documents, int code, std::uint64_t cut_seed, bool modes = false) {
    const std::array<int, 9> widths = {0, 1, 1, 2, 4, 8, 8, 4, 2};
    const int width = widths[static_cast<std::size_t>(code)];
    std::mt19937_64 random(cut_seed);
    std::vector<std::int32_t> lengths;
    std::vector<std::int64_t> pointers, entries{0};
    for (const auto& document : documents) {
      for (std::size_t at = 0; at < document.size();) {
        const std::size_t count = std::min<std::size_t>(document.size() - at, random() % 40);
        lengths.push_back(static_cast<std::int32_t>(count));
        pointers.push_back(static_cast<std::int64_t>(bin.size()));
        for (std::size_t i = at; i < at + count; ++i)
          bin.append(reinterpret_cast<const char*>(&document[i]), static_cast<std::size_t>(width));
        at += count;
      }
      entries.push_back(static_cast<std::int64_t>(lengths.size()));
    }
    idx.append("MMIDIDX\0\0", 9);
    put<std::uint64_t>(idx, 1);
    put<std::uint8_t>(idx, static_cast<std::uint8_t>(code));
    put<std::uint64_t>(idx, lengths.size());
    put<std::uint64_t>(idx, entries.size());
    for (auto v : lengths) put(idx, v);
    for (auto v : pointers) put(idx, v);
    for (auto v : entries) put(idx, v);
    if (modes) idx.append(lengths.size(), '\0');
  }
};

/// Compares a dataset with documents and (if not empty) masks, token by token and over random
/// ranges.
void expect_equal(const Dataset& data, const Documents& documents, const Documents& masks,
                  std::mt19937_64& random) {
  ASSERT_EQ(data.samples(), static_cast<std::int64_t>(documents.size()));
  for (std::size_t s = 0; s < documents.size(); ++s) {
    const auto& expected = documents[s];
    const auto sample = static_cast<std::int64_t>(s),
               length = static_cast<std::int64_t>(expected.size());
    ASSERT_EQ(data.length(sample), length);
    std::int64_t loss_tokens = 0;
    for (std::size_t i = 1; i < expected.size(); ++i)
      loss_tokens += masks.empty() || masks[s][i] != 0;
    EXPECT_EQ(data.loss_tokens(sample), loss_tokens);
    std::int64_t begin = static_cast<std::int64_t>(random() % (expected.size() + 1)),
                 end = static_cast<std::int64_t>(random() % (expected.size() + 1));
    if (begin > end) std::swap(begin, end);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(end - begin)), targets(tokens.size());
    data.tokens(sample, begin, end, tokens);
    data.targets(sample, begin, end, targets);
    for (std::int64_t p = begin; p < end; ++p) {
      const auto i = static_cast<std::size_t>(p), at = static_cast<std::size_t>(p - begin);
      ASSERT_EQ(tokens[at], expected[i]) << "seed " << test_seed();
      const bool carries_loss = p + 1 < length && (masks.empty() || masks[s][i + 1] != 0);
      ASSERT_EQ(targets[at], carries_loss ? expected[i + 1] : -1) << "seed " << test_seed();
    }
  }
}

class Formats : public TemporaryFolder {
 protected:
  DataOptions megatron(const Indexed& files, const std::string& name = "corpus") const {
    DataOptions options;
    options.source = DataSource::megatron;
    options.vocabulary = 100;
    options.path = dir + "/" + name;
    write(name + ".idx", files.idx);
    write(name + ".bin", files.bin);
    return options;
  }
  static std::string error_of(const DataOptions& options) {
    try {
      open_dataset(options);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
};
using Megatron = Formats;
using Hdf5Tokens = Formats;

TEST_F(Megatron, EveryTokenType) {
  std::mt19937_64 random(test_seed());
  for (int code : {1, 2, 3, 4, 5, 8}) {
    const Documents documents = random_documents(random, 40, 100);
    DataOptions options = megatron(Indexed(documents, code, random(), code == 4));
    for (const char* suffix : {"", ".bin", ".idx"}) {
      options.path = dir + "/corpus" + suffix;
      expect_equal(*open_dataset(options), documents, {}, random);
    }
  }
}

// Ids of vocabularies above half of 16 bits, such as Qwen's first 64 thousand.
TEST_F(Megatron, UnsignedIdsUseAllOfTheirBits) {
  std::mt19937_64 random(test_seed());
  const Documents documents{{40000, 65535, 5}, {32767, 32768}};
  DataOptions options = megatron(Indexed(documents, 8, 3));
  options.vocabulary = 70000;
  expect_equal(*open_dataset(options), documents, {}, random);
}

TEST_F(Megatron, LossMaskBesideTheTokens) {
  std::mt19937_64 random(test_seed() + 1);
  const Documents documents = random_documents(random, 50, 100);
  Documents masks = documents;
  for (auto& d : masks) {
    for (auto& m : d) m = static_cast<std::int64_t>(random() % 2);
  }
  DataOptions options = megatron(Indexed(documents, 8, test_seed()));
  megatron(Indexed(masks, 1, test_seed()), "mask");
  options.mask_path = dir + "/mask";
  expect_equal(*open_dataset(options), documents, masks, random);
  // Chunks count theirs.
  const auto whole = open_dataset(options);
  std::vector<SampleLength> samples;
  for (std::int64_t s = 0; s < whole->samples(); ++s)
    samples.push_back({s, whole->length(s), whole->loss_tokens(s)});
  Batch batch;
  batch.micro_batches = {construct_chunks(samples, 16)};
  const std::int64_t all = batch.loss_tokens();
  count_loss_tokens(batch, *whole);
  EXPECT_EQ(batch.loss_tokens(), all);
  for (const MicroBatch& m : batch.micro_batches[0])
    for (const Segment& s : m.segments) {
      std::int64_t expected = 0;
      for (std::int64_t t = s.begin; t < s.end && t + 1 < whole->length(s.sample); ++t)
        expected += masks[s.sample][t + 1] != 0;
      EXPECT_EQ(s.loss_tokens, expected)
          << "sample " << s.sample << " from " << s.begin << ", seed " << test_seed();
    }
  // Split samples count their own targets.
  options.max_tokens = 7;
  options.long_samples = LongDocuments::split;
  const auto split = open_dataset(options);
  for (std::int64_t s = 0; s < split->samples(); ++s) {
    std::vector<std::int32_t> targets(static_cast<std::size_t>(split->length(s)));
    split->targets(s, 0, split->length(s), targets);
    EXPECT_EQ(split->loss_tokens(s), static_cast<std::int64_t>(targets.size()) -
                                         std::count(targets.begin(), targets.end(), -1));
  }
  // A mask of other lengths, types or documents is refused by name.
  megatron(Indexed(masks, 1, test_seed() + 9), "mask");
  EXPECT_NE(error_of(options).find("mask.idx"), std::string::npos);
  megatron(Indexed(masks, 8, test_seed()), "mask");
  EXPECT_NE(error_of(options).find("uint16"), std::string::npos);
  masks.pop_back();
  megatron(Indexed(masks, 1, test_seed()), "mask");
  EXPECT_NE(error_of(options).find("mask.idx"), std::string::npos);
}

TEST_F(Megatron, FilesThatChangeAfterTheyWereOpenedAreRefused) {
  const Documents documents(50, std::vector<std::int64_t>(100, 7));
  const Documents masks(50, std::vector<std::int64_t>(100, 1));
  for (const std::string name : {"corpus.idx", "corpus.bin", "mask.idx", "mask.bin"}) {
    for (const bool shorter : {true, false}) {  // under the map the first would be SIGBUS
      DataOptions options = megatron(Indexed(documents, 8, 1));
      megatron(Indexed(masks, 1, 1), "mask");
      options.mask_path = dir + "/mask";
      const std::string path = dir + "/" + name, good = read(path);
      fs::last_write_time(path, fs::last_write_time(path) - std::chrono::hours(1));
      const auto data = open_dataset(options);
      std::vector<std::int32_t> out(100);
      const auto read_last = [&] {
        data->tokens(49, 0, 100, out);
        data->targets(49, 0, 100, out);
      };
      read_last();
      if (shorter) fs::resize_file(path, 10);
      if (!shorter) write(name, std::string(good.size(), '\0'));
      std::string message;
      try {
        read_last();
      } catch (const Error& error) {
        message = error.what();
      }
      const std::string told = fmt::format("{} had {} bytes when", path, good.size());
      EXPECT_NE(message.find(told), std::string::npos) << message;
      EXPECT_NE(message.find("-r latest"), std::string::npos) << message;
    }
  }
}

TEST_F(Megatron, IdsOutsideTheVocabulary) {
  for (const auto& [code, token] :
       {std::pair<int, std::int64_t>{4, 100}, {4, -1}, {5, std::int64_t{1} << 32}, {8, 65535}}) {
    const auto data = open_dataset(megatron(Indexed({{1, 2, token, 3}}, code, 1)));
    std::vector<std::int32_t> out(2);
    data->tokens(0, 0, 2, out);
    try {
      data->tokens(0, 1, 3, out);
      ADD_FAILURE() << token;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("token 2"), std::string::npos) << error.what();
    }
  }
}

TEST_F(Megatron, DamagedFilesAreRefusedByName) {
  std::mt19937_64 random(test_seed() + 2);
  const Indexed good(random_documents(random, 30, 100), 4, random());
  ASSERT_EQ(error_of(megatron(good)), "");
  const auto expect_refused = [&](const Indexed& bad, const std::string& what) {
    if (bad.idx == good.idx && bad.bin == good.bin)
      return;  // a drawn value can be the one that was there
    const std::string message = error_of(megatron(bad));
    EXPECT_TRUE(message.find("corpus.idx") != std::string::npos ||
                message.find("corpus.bin") != std::string::npos)
        << what << " gives \"" << message << "\", seed " << test_seed();
  };
  for (int i = 0; i < 40; ++i) {
    Indexed bad = good;
    const std::size_t place = random() % bad.idx.size();
    const auto bit = static_cast<char>(1 << (random() % 8));
    const int kind = i % 4;
    // The index says nothing twice, but all of it hangs together: one altered bit anywhere
    // contradicts the rest.
    if (kind == 0) bad.idx[place] = static_cast<char>(bad.idx[place] ^ bit);
    if (kind == 1) bad.idx.resize(place);
    if (kind == 2) bad.bin.resize(random() % bad.bin.size());
    if (kind == 3)
      std::memset(bad.idx.data() + place, static_cast<int>(random()),
                  std::min<std::size_t>(bad.idx.size() - place, 40));
    if (bad.idx == good.idx && bad.bin == good.bin) continue;
    const bool inner_document_entry =
        place + (kind == 3 ? 40 : 1) > good.idx.size() - 8 * 31;  // zeros may stand before them
    if ((kind == 0 || kind == 3) && inner_document_entry) {
      // Another first sequence of a document can be as valid as the one written; then it must open
      // and read without harm.
      const std::string message = error_of(megatron(bad));
      if (message.empty()) {
        const auto data = open_dataset(megatron(bad));
        for (std::int64_t s = 0; s < data->samples(); ++s) {
          std::vector<std::int32_t> out(static_cast<std::size_t>(data->length(s)));
          data->tokens(s, 0, data->length(s), out);
        }
        continue;
      }
    }
    expect_refused(bad, fmt::format("damage {} at {}", kind, place));
  }
  const auto with = [&](std::size_t offset, auto value) {
    Indexed bad = good;
    std::memcpy(bad.idx.data() + offset, &value, sizeof value);
    return bad;
  };
  expect_refused(with(0, 'X'), "magic");
  expect_refused(with(9, std::uint64_t{2}), "version");
  for (std::uint8_t code : {0, 6, 7, 9, 255}) expect_refused(with(17, code), "dtype");
  expect_refused(with(17, std::uint8_t{8}), "narrower dtype");
  for (std::uint64_t count : {std::uint64_t{0}, ~std::uint64_t{0}, std::uint64_t{1} << 61,
                              std::uint64_t{1} << 63, (~std::uint64_t{0}) / 12 + 1}) {
    expect_refused(with(18, count), "sequences");
    expect_refused(with(26, count), "document entries");
  }
  for (std::int32_t length : {-1, INT32_MIN, INT32_MAX}) expect_refused(with(34, length), "length");
  for (std::int64_t pointer : {std::int64_t{-4}, std::int64_t{4}, INT64_MIN, INT64_MAX}) {
    std::uint64_t sequences = 0;
    std::memcpy(&sequences, good.idx.data() + 18, 8);
    expect_refused(with(34 + 4 * sequences + 8, pointer), "pointer");
    expect_refused(with(good.idx.size() - 8, pointer), "last document entry");
    expect_refused(with(good.idx.size() - 16, pointer / 2 - 1000000), "document entry");
  }
  Indexed away = good;
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n";
  away.bin.assign(pointer.begin(), pointer.end());
  expect_refused(away, "corpus.bin: is a Git LFS pointer");
  fs::remove(dir + "/corpus.bin");
  DataOptions options = megatron(good);
  fs::remove(dir + "/corpus.bin");
  EXPECT_NE(error_of(options).find("corpus.bin"), std::string::npos);
}

/// /tokens, /offsets and, where given, /loss_mask of type Mask.
template <class Mask = std::uint8_t>
void write_hdf5(const std::string& path, const Documents& documents, const Documents& masks) {
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> offsets{0};
  std::vector<Mask> mask;
  for (std::size_t d = 0; d < documents.size(); ++d) {
    tokens.insert(tokens.end(), documents[d].begin(), documents[d].end());
    if (!masks.empty()) mask.insert(mask.end(), masks[d].begin(), masks[d].end());
    offsets.push_back(static_cast<std::int64_t>(tokens.size()));
  }
  const hdf5::Handle file = hdf5::create_file(path);
  hdf5::write_vector<std::int32_t>(file, "tokens", tokens);
  hdf5::write_vector<std::int64_t>(file, "offsets", offsets);
  if (!masks.empty()) hdf5::write_vector<Mask>(file, "loss_mask", mask);
}

TEST_F(Hdf5Tokens, ReadByRange) {
  std::mt19937_64 random(test_seed() + 3);
  const Documents documents = random_documents(random, 60, 100);
  Documents masks = documents;
  for (auto& d : masks) {
    for (auto& m : d) m = static_cast<std::int64_t>(random() % 2);
  }
  DataOptions options;
  options.source = DataSource::hdf5;
  options.vocabulary = 100;
  options.path = dir + "/tokens.h5";
  write_hdf5(options.path, documents, {});
  expect_equal(*open_dataset(options), documents, {}, random);
  write_hdf5(options.path, documents, masks);
  expect_equal(*open_dataset(options), documents, masks, random);
  write_hdf5<std::int64_t>(options.path, documents, masks);  // read by way of a conversion
  expect_equal(*open_dataset(options), documents, masks, random);
}

TEST_F(Hdf5Tokens, InconsistentFilesAreRefusedByName) {
  DataOptions options;
  options.source = DataSource::hdf5;
  options.vocabulary = 100;
  options.path = dir + "/tokens.h5";
  const auto expect_refused = [&](const std::vector<std::int32_t>& tokens,
                                  const std::vector<std::int64_t>& offsets, std::size_t mask,
                                  const std::string& text) {
    {
      const hdf5::Handle file = hdf5::create_file(options.path);
      hdf5::write_vector<std::int32_t>(file, "tokens", tokens);
      hdf5::write_vector<std::int64_t>(file, "offsets", offsets);
      if (mask > 0)
        hdf5::write_vector<std::uint8_t>(file, "loss_mask", std::vector<std::uint8_t>(mask, 1));
    }
    const std::string message = error_of(options);
    EXPECT_NE(message.find(options.path), std::string::npos) << message;
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  expect_refused({1, 2, 3}, {}, 0, "/offsets");
  expect_refused({1, 2, 3}, {1, 3}, 0, "/offsets");
  expect_refused({1, 2, 3}, {0, 2}, 0, "/offsets");
  expect_refused({1, 2, 3}, {0, 4}, 0, "/offsets");
  expect_refused({1, 2, 3}, {0, 2, 1, 3}, 0, "/offsets[2]");
  expect_refused({1, 2, 3}, {0, -5, 3}, 0, "/offsets[1]");
  expect_refused({1, 2, 3}, {0, 3}, 2, "/loss_mask");
  expect_refused({}, {0}, 0, "no sample");
  {
    const hdf5::Handle file = hdf5::create_file(options.path);
    hdf5::write_vector<double>(file, "tokens", std::vector<double>{1, 2});
    hdf5::write_vector<std::int64_t>(file, "offsets", std::vector<std::int64_t>{0, 2});
  }
  EXPECT_NE(error_of(options).find("whole numbers"), std::string::npos);
  { const hdf5::Handle file = hdf5::create_file(options.path); }
  EXPECT_NE(error_of(options).find("/tokens"), std::string::npos);
  write("tokens.h5", "this is no HDF5 file at all");
  EXPECT_NE(error_of(options).find(options.path + " is no HDF5 file"), std::string::npos);
  write("tokens.h5", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n");
  EXPECT_NE(error_of(options).find(options.path + ": is a Git LFS pointer"), std::string::npos);
  options.path = dir + "/absent.h5";
  EXPECT_NE(error_of(options).find("absent.h5 is no file"), std::string::npos);
}

TEST_F(Hdf5Tokens, UnknownDatasetsAndForeignTokenizersAreRefused) {
  DataOptions options;
  options.source = DataSource::hdf5;
  options.path = dir + "/tokens.h5";
  options.tokenizer = dir;
  write_hdf5(options.path, {{1, 2, 3}, {4, 5}, {6, 7}}, {});
  {
    const hdf5::Handle file = hdf5::open_file(options.path, true);
    hdf5::write_vector<std::int64_t>(file, "rows", std::vector<std::int64_t>{8, 8, 9});
    hdf5::write_attribute(file, "tokenizer", std::string("words"));
    // CRC-32 of "0\ta\n1\tb\n7\t<end>\n".
    hdf5::write_attribute(file, "tokenizer_crc32", std::uint64_t{4184619630});
  }
  write("tokenizer.json",
        R"({"model":{"vocab":{"b":1,"a":0}},"added_tokens":[{"id":7,"content":"<end>"}]})");
  {
    const auto data = open_dataset(options);
    EXPECT_EQ(data->document(0), data->document(1));
    EXPECT_NE(data->document(1), data->document(2));
  }
  write("tokenizer.json", R"({"model":{"vocab":[["a",0.5],["b",0.25]]}})");
  EXPECT_NE(error_of(options).find("tokenizer words"), std::string::npos);
  write("tokenizer.json", "{}");
  EXPECT_NE(error_of(options).find("no table of tokens"), std::string::npos);
  options.source = DataSource::files;
  options.paths = {dir};
  EXPECT_NE(error_of(options).find("reads bytes"), std::string::npos);
  options.source = DataSource::hdf5;
  options.tokenizer.clear();
  {
    const hdf5::Handle file = hdf5::open_file(options.path, true);
    hdf5::write_vector<std::uint8_t>(file, "mask", std::vector<std::uint8_t>(7, 1));
  }
  EXPECT_NE(error_of(options).find("/mask is not known"), std::string::npos);
}

TEST_F(Hdf5Tokens, OnlyDatasetsInOnePieceAreRead) {
  DataOptions options;
  options.source = DataSource::hdf5;
  options.vocabulary = 100;
  options.path = dir + "/tokens.h5";
  const std::vector<std::int32_t> tokens(4000, 7);
  const std::vector<std::int64_t> offsets{0, 1500, 4000};
  for (const char* form : {"contiguous", "chunked", "compressed", "compact"}) {
    const std::string how = form;
    const hdf5::Handle creation = hdf5::property_list(H5P_DATASET_CREATE);
    const hsize_t chunk = 1000;
    if (how == "chunked" || how == "compressed") H5Pset_chunk(creation, 1, &chunk);
    if (how == "compressed") H5Pset_deflate(creation, 9);
    if (how == "compact") H5Pset_layout(creation, H5D_COMPACT);
    {
      const hdf5::Handle file = hdf5::create_file(options.path);
      const hdf5::Handle made =
          hdf5::create_dataset(file, "tokens", H5T_NATIVE_INT32, {tokens.size()}, creation);
      hdf5::check(H5Dwrite(made, H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, tokens.data()),
                  how);
      hdf5::write_vector<std::int64_t>(file, "offsets", offsets);
    }
    const std::string message = error_of(options);
    if (how == "contiguous") {
      EXPECT_EQ(message, "");
    } else {
      EXPECT_NE(message.find(options.path + ":/tokens"), std::string::npos) << how << message;
      EXPECT_NE(message.find("h5repack -f NONE -l CONTI"), std::string::npos) << how << message;
    }
  }
}

TEST_F(Hdf5Tokens, TruncatedFilesAreRefused) {
  std::mt19937_64 random(test_seed() + 4);
  DataOptions options;
  options.source = DataSource::hdf5;
  options.path = dir + "/tokens.h5";
  write_hdf5(options.path, random_documents(random, 60, 100), {});
  const std::string good = read(options.path);
  for (int i = 0; i < 20; ++i) {
    write("tokens.h5", good.substr(0, random() % good.size()));
    EXPECT_NE(error_of(options).find(options.path), std::string::npos) << "seed " << test_seed();
  }
}

TEST_F(Hdf5Tokens, AFileThatChangesAfterItWasOpenedIsRefused) {
  DataOptions options;
  options.source = DataSource::hdf5;
  options.vocabulary = 100;
  options.path = dir + "/tokens.h5";
  const Documents documents(50, std::vector<std::int64_t>(100, 7));
  for (const std::string how : {"left alone", "shorter", "longer", "overwritten", "replaced"}) {
    fs::remove(options.path);
    write_hdf5(options.path, documents, {});
    const std::string good = read(options.path);
    // Long ago: two writes one after the other may have the same time.
    fs::last_write_time(options.path, fs::last_write_time(options.path) - std::chrono::hours(1));
    const auto data = open_dataset(options);
    std::vector<std::int32_t> out(100);
    data->tokens(49, 0, 100, out);
    if (how == "shorter") fs::resize_file(options.path, 1000);
    if (how == "longer") fs::resize_file(options.path, good.size() + 1000);
    if (how == "overwritten") write("tokens.h5", std::string(good.size(), '\0'));
    if (how == "replaced") {  // by a file of its own, as most programs write: the old one is read
      write("fresh.h5", std::string(good.size(), '\0'));
      fs::rename(dir + "/fresh.h5", options.path);
    }
    std::string message;
    try {
      data->tokens(49, 0, 100, out);
    } catch (const Error& error) {
      message = error.what();
    }
    if (how == "left alone" || how == "replaced") {
      EXPECT_EQ(message, "") << how;
      EXPECT_EQ(out, std::vector<std::int32_t>(100, 7)) << how;
    } else {
      const std::string told = fmt::format("{} had {} bytes when", options.path, good.size());
      EXPECT_NE(message.find(told), std::string::npos) << how << ": " << message;
      EXPECT_NE(message.find("-r latest"), std::string::npos) << how << ": " << message;
    }
  }
}

}  // namespace
}  // namespace ballast
