// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// The plants as a C interface for the tests in Python.

#include <algorithm>
#include <cstring>
#include <vector>

#include "plant.h"

namespace softnpu::ascendc::tests {
namespace {

const std::vector<Plant>& all() {
  static const std::vector<Plant> plants = [] {
    std::vector<Plant> result;
    for (const Plants& part : {parameter_plants(), queue_plants(), order_plants()}) {
      result.insert(result.end(), part.plants, part.plants + part.count);
    }
    return result;
  }();
  return plants;
}

void copy_text(const std::string& text, char* to, size_t size) {
  const size_t count = std::min(text.size(), size - 1);
  std::memcpy(to, text.data(), count);
  to[count] = '\0';
}

}  // namespace
}  // namespace softnpu::ascendc::tests

extern "C" {

struct PlantReport {
  int32_t expected, trap, line;
  char name[64], file[256], text[768];
};

__attribute__((visibility("default"))) int32_t ascendc_plant_count() {
  return static_cast<int32_t>(softnpu::ascendc::tests::all().size());
}

// Runs plant `index`, the wrong kernel or its twin, its blocks in the given order. trap 0: nothing was found.
__attribute__((visibility("default"))) void ascendc_plant_run(int32_t index, int32_t wrong, int32_t order,
                                                              PlantReport* report) {
  using namespace softnpu::ascendc;
  const tests::Plant& plant = tests::all().at(static_cast<size_t>(index));
  *report = {};
  report->expected = static_cast<int32_t>(plant.trap);
  tests::copy_text(plant.name, report->name, sizeof(report->name));
  alignas(512) static thread_local float memory[3][tests::Gm::kFloats];
  std::fill(&memory[0][0], &memory[0][0] + 3 * tests::Gm::kFloats, 0.5f);
  const tests::Gm gm{memory[0], memory[1], memory[2]};
  Options options;
  options.sequence = static_cast<Options::Sequence>(order);
  Launch launch(plant.blocks, options);
  launch.gm(gm.in, sizeof(memory[0]), Access::read, "in");
  launch.gm(gm.out, sizeof(memory[1]), Access::read_write, "out");
  launch.gm(gm.sink, sizeof(memory[2]), Access::write, "sink");
  try {
    launch.run([&] { (wrong != 0 ? plant.wrong : plant.right)(gm); });
  } catch (const Misuse& misuse) {
    report->trap = misuse.number();
    report->line = static_cast<int32_t>(misuse.line());
    tests::copy_text(misuse.file(), report->file, sizeof(report->file));
    tests::copy_text(misuse.what(), report->text, sizeof(report->text));
  }
}
}
