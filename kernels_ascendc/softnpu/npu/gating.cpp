// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Which experts a token goes to, and with what weight. Contract: vllm-ascend 0.23.0's csrc/moe/moe_gating_top_k and
// moe_gating_top_k_hash (adapters, tilings, kernels). Scores are computed in float32 from each row alone; equal scores
// go to the lowest expert. Where the operator does not write `out` (out_flag false), it is poison. Softplus is the
// kernel's log(1 + exp(x)), which overflows above 88.
#include <cmath>
#include <limits>
#include <numeric>

#include "operator.h"
#include "poison.h"

namespace softnpu {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

enum Norm : int64_t { kSoftmax = 0, kSigmoid = 1, kSoftplus = 2 };

struct Gating {
  const char* name;
  int64_t k, k_group, group_count, group_select_mode, renorm, norm_type;
  bool out_flag;
  double routed_scaling_factor, eps;

  bool grouped(int64_t experts) const { return group_count != 1 && group_count != experts && k_group != group_count; }
};

std::vector<float> scores_of(const float* x, int64_t experts, int64_t norm_type) {
  std::vector<float> scores(x, x + experts);
  if (norm_type == kSoftmax) {
    const float most = *std::max_element(x, x + experts);
    float sum = 0;
    for (float& s : scores) sum += s = std::exp(s - most);
    for (float& s : scores) s /= sum;
  } else if (norm_type == kSigmoid) {
    for (float& s : scores) s = 1.0f / (1.0f + std::exp(-s));
  } else {
    for (float& s : scores) s = std::sqrt(std::log(std::exp(s) + 1.0f));
  }
  return scores;
}

// The `count` indices of the largest values, larger first, equal ones in index order.
std::vector<int64_t> largest(const std::vector<float>& values, int64_t count) {
  std::vector<int64_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return values[a] > values[b]; });
  order.resize(count);
  return order;
}

// -inf for the experts outside the k_group best groups: by their largest score (mode 0) or the sum of the two largest.
void keep_groups(const Gating& g, std::vector<float>* choice) {
  const int64_t per_group = static_cast<int64_t>(choice->size()) / g.group_count;
  std::vector<float> worth(g.group_count);
  for (int64_t i = 0; i < g.group_count; ++i) {
    const std::vector<float> group(choice->begin() + i * per_group, choice->begin() + (i + 1) * per_group);
    const auto best = largest(group, g.group_select_mode == 1 ? 2 : 1);
    for (int64_t e : best) worth[i] += group[e];
  }
  std::vector<bool> kept(g.group_count);
  for (int64_t i : largest(worth, g.k_group)) kept[i] = true;
  for (size_t e = 0; e < choice->size(); ++e)
    if (!kept[e / per_group]) (*choice)[e] = -std::numeric_limits<float>::infinity();
}

// `given`: the experts of each row, where a table has chosen them; else they are chosen here.
ThreeTensors gate(const Gating& g, const Tensor& x, const OptionalTensor& bias, const Tensor& given) {
  const int64_t rows = x.size(0), experts = x.size(1);
  const Tensor logits = x.to(at::kFloat).contiguous();
  const Tensor biases = bias.has_value() ? bias->to(at::kFloat).contiguous() : Tensor();
  Tensor y = at::empty({rows, g.k}, logits.options());
  Tensor indices = at::empty({rows, g.k}, logits.options().dtype(at::kInt));
  Tensor out = poison({rows, experts}, logits.options());
  for (int64_t row = 0; row < rows; ++row) {
    const auto scores = scores_of(logits.const_data_ptr<float>() + row * experts, experts, g.norm_type);
    std::vector<int64_t> chosen;
    if (given.defined()) {
      const int64_t* expert = given.const_data_ptr<int64_t>() + row * g.k;
      chosen.assign(expert, expert + g.k);
    } else {
      auto choice = scores;
      if (biases.defined())
        for (int64_t e = 0; e < experts; ++e) choice[e] += biases.const_data_ptr<float>()[e];
      if (g.grouped(experts)) keep_groups(g, &choice);
      chosen = largest(choice, g.k);
    }
    float sum = 0;
    for (int64_t e : chosen) sum += scores[e];
    const bool divide = g.norm_type != kSoftmax || g.renorm == 1;
    for (int64_t i = 0; i < g.k; ++i) {
      const float weight = divide ? scores[chosen[i]] / (sum + static_cast<float>(g.eps)) : scores[chosen[i]];
      y.mutable_data_ptr<float>()[row * g.k + i] = weight * static_cast<float>(g.routed_scaling_factor);
      indices.mutable_data_ptr<int32_t>()[row * g.k + i] = static_cast<int32_t>(chosen[i]);
    }
    if (g.out_flag) std::copy(scores.begin(), scores.end(), out.mutable_data_ptr<float>() + row * experts);
  }
  return {y.to(x.scalar_type()), indices, out};
}

ThreeTensors gate_meta(const Gating& g, const Tensor& x, const OptionalTensor& bias) {
  SOFTNPU_EXPECT(x.dim() == 2, g.name, "x's dims", x.dim(), "2");
  const auto type = x.scalar_type();
  SOFTNPU_EXPECT(type == at::kHalf || type == at::kFloat || type == at::kBFloat16, g.name, "x's dtype", type,
                 "Half, BFloat16 or Float");
  const int64_t experts = x.size(1);
  SOFTNPU_EXPECT(experts > 0 && experts <= 2048, g.name, "the number of experts", experts, "1 to 2048");
  if (bias.has_value()) {
    SOFTNPU_EXPECT(bias->dim() == 1 && bias->size(0) == experts, g.name, "bias", bias->sizes(), "[", experts, "]");
    SOFTNPU_EXPECT(bias->scalar_type() == type, g.name, "bias's dtype", bias->scalar_type(), "x's, ", type);
  }
  SOFTNPU_EXPECT(g.k > 0 && g.k <= experts, g.name, "k", g.k, "1 to the number of experts, ", experts);
  SOFTNPU_EXPECT(g.group_count > 0 && experts % g.group_count == 0, g.name, "group_count", g.group_count,
                 "a divisor of the number of experts, ", experts);
  SOFTNPU_EXPECT(g.k_group > 0 && g.k_group <= g.group_count, g.name, "k_group", g.k_group, "1 to group_count, ",
                 g.group_count);
  SOFTNPU_EXPECT(g.group_select_mode == 0 || g.group_select_mode == 1, g.name, "group_select_mode", g.group_select_mode,
                 "0 or 1");
  const int64_t per_group = experts / g.group_count;
  SOFTNPU_EXPECT(g.group_select_mode == 0 || per_group >= 2, g.name, "the experts of a group", per_group,
                 "at least 2 in group_select_mode 1");
  SOFTNPU_EXPECT(g.k <= g.k_group * per_group, g.name, "k", g.k, "at most the experts of k_group groups, ",
                 g.k_group * per_group);
  SOFTNPU_EXPECT(!g.grouped(experts) || g.group_count * ((per_group + 31) / 32 * 32) <= 2048, g.name, "group_count",
                 g.group_count, "at most 2048 experts with each group padded to a multiple of 32");
  const auto options = x.options();
  return {at::empty({x.size(0), g.k}, options), at::empty({x.size(0), g.k}, options.dtype(at::kInt)),
          at::empty({x.size(0), experts}, options.dtype(at::kFloat))};
}

// ---------------------------------------------------------------------------------------------- by score

Gating by_score(int64_t k, int64_t k_group, int64_t group_count, int64_t group_select_mode, int64_t renorm,
                int64_t norm_type, bool out_flag, double routed_scaling_factor, double eps) {
  return {"moe_gating_top_k",    k,  k_group, group_count, group_select_mode, renorm, norm_type, out_flag,
          routed_scaling_factor, eps};
}

ThreeTensors top_k(const Tensor& x, int64_t k, int64_t k_group, int64_t group_count, int64_t group_select_mode,
                   int64_t renorm, int64_t norm_type, bool out_flag, double routed_scaling_factor, double eps,
                   const OptionalTensor& bias) {
  return gate(
      by_score(k, k_group, group_count, group_select_mode, renorm, norm_type, out_flag, routed_scaling_factor, eps), x,
      bias, Tensor());
}

ThreeTensors top_k_meta(const Tensor& x, int64_t k, int64_t k_group, int64_t group_count, int64_t group_select_mode,
                        int64_t renorm, int64_t norm_type, bool out_flag, double routed_scaling_factor, double eps,
                        const OptionalTensor& bias) {
  const Gating g =
      by_score(k, k_group, group_count, group_select_mode, renorm, norm_type, out_flag, routed_scaling_factor, eps);
  SOFTNPU_EXPECT(renorm == 0 || renorm == 1, g.name, "renorm", renorm, "0 or 1");
  SOFTNPU_EXPECT(norm_type == kSoftmax || norm_type == kSigmoid, g.name, "norm_type", norm_type,
                 "0 (softmax) or 1 (sigmoid)");
  return gate_meta(g, x, bias);
}

// ---------------------------------------------------------------------------------------------- by score or table

Gating by_hash(int64_t k, int64_t k_group, int64_t group_count, double routed_scaling_factor, double eps,
               int64_t group_select_mode, int64_t renorm, int64_t norm_type, bool out_flag) {
  return {"moe_gating_top_k_hash", k,  k_group, group_count, group_select_mode, renorm, norm_type, out_flag,
          routed_scaling_factor,   eps};
}

ThreeTensors top_k_hash(const Tensor& x, int64_t k, const OptionalTensor& bias, const OptionalTensor& input_ids,
                        const OptionalTensor& tid2eid, int64_t k_group, int64_t group_count,
                        double routed_scaling_factor, double eps, int64_t group_select_mode, int64_t renorm,
                        int64_t norm_type, bool out_flag) {
  const Gating g =
      by_hash(k, k_group, group_count, routed_scaling_factor, eps, group_select_mode, renorm, norm_type, out_flag);
  Tensor given;
  if (tid2eid.has_value()) {
    const Tensor ids = input_ids->reshape(-1).to(at::kLong);
    for (int64_t i = 0; i < ids.numel(); ++i) {
      const int64_t id = ids.const_data_ptr<int64_t>()[i];
      SOFTNPU_EXPECT(id >= 0 && id < tid2eid->size(0), g.name, c10::str("input_ids[", i, "]"), id,
                     "a row of tid2eid, 0 to ", tid2eid->size(0) - 1);
    }
    given = tid2eid->index_select(0, ids).to(at::kLong).contiguous();
    for (int64_t i = 0; i < given.numel(); ++i) {
      const int64_t expert = given.const_data_ptr<int64_t>()[i];
      SOFTNPU_EXPECT(expert >= 0 && expert < x.size(1), g.name,
                     c10::str("tid2eid[", ids.const_data_ptr<int64_t>()[i / k], ", ", i % k, "]"), expert,
                     "an expert, 0 to ", x.size(1) - 1);
    }
  }
  return gate(g, x, bias, given);
}

ThreeTensors top_k_hash_meta(const Tensor& x, int64_t k, const OptionalTensor& bias, const OptionalTensor& input_ids,
                             const OptionalTensor& tid2eid, int64_t k_group, int64_t group_count,
                             double routed_scaling_factor, double eps, int64_t group_select_mode, int64_t renorm,
                             int64_t norm_type, bool out_flag) {
  const Gating g =
      by_hash(k, k_group, group_count, routed_scaling_factor, eps, group_select_mode, renorm, norm_type, out_flag);
  SOFTNPU_EXPECT(renorm == 0, g.name, "renorm", renorm, "0");
  SOFTNPU_EXPECT(norm_type >= kSoftmax && norm_type <= kSoftplus, g.name, "norm_type", norm_type,
                 "0 (softmax), 1 (sigmoid) or 2 (softplus)");
  SOFTNPU_EXPECT(norm_type != kSoftplus || group_count == 1, g.name, "group_count", group_count, "1 with softplus");
  SOFTNPU_EXPECT(eps > 0, g.name, "eps", eps, "more than 0");
  SOFTNPU_EXPECT(routed_scaling_factor > 0, g.name, "routed_scaling_factor", routed_scaling_factor, "more than 0");
  ThreeTensors result = gate_meta(g, x, bias);
  SOFTNPU_EXPECT(input_ids.has_value() == tid2eid.has_value(), g.name, "input_ids",
                 input_ids.has_value() ? "given" : "none", "both input_ids and tid2eid, or neither");
  if (!tid2eid.has_value()) return result;
  SOFTNPU_EXPECT(!g.grouped(x.size(1)), g.name, "k_group", k_group, "no selection of groups where a table chooses");
  const auto integer = [](const Tensor& t) { return t.scalar_type() == at::kInt || t.scalar_type() == at::kLong; };
  SOFTNPU_EXPECT(integer(*input_ids), g.name, "input_ids' dtype", input_ids->scalar_type(), "Int or Long");
  SOFTNPU_EXPECT(input_ids->numel() == x.size(0), g.name, "input_ids", input_ids->sizes(), x.size(0),
                 " ids, one for each row of x");
  SOFTNPU_EXPECT(integer(*tid2eid), g.name, "tid2eid's dtype", tid2eid->scalar_type(), "Int or Long");
  // The kernel reads k experts at k times the id, whatever the shape.
  SOFTNPU_EXPECT(tid2eid->dim() == 2 && tid2eid->size(1) == k, g.name, "tid2eid", tid2eid->sizes(),
                 "[ids, k], k = ", k);
  return result;
}

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_FRAGMENT(_C_ascend, m) {
  m.def(
      "moe_gating_top_k(Tensor x, int k, int k_group, int group_count, int group_select_mode, int renorm, "
      "int norm_type, bool out_flag, float routed_scaling_factor, float eps,Tensor? bias_opt=None)-> (Tensor y ,"
      "Tensor expert_idx, Tensor out)");
  m.def(
      "moe_gating_top_k_hash(Tensor x, int k, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None, "
      "int k_group=1, int group_count=1, float routed_scaling_factor=1.0, float eps=1e-20, int group_select_mode=0, "
      "int renorm=0, int norm_type=0, bool out_flag=False) -> (Tensor y, Tensor expert_idx, Tensor out)");
}
TORCH_LIBRARY_IMPL(_C_ascend, CPU, m) {
  m.impl("moe_gating_top_k", softnpu::top_k);
  m.impl("moe_gating_top_k_hash", softnpu::top_k_hash);
}
TORCH_LIBRARY_IMPL(_C_ascend, Meta, m) {
  m.impl("moe_gating_top_k", softnpu::top_k_meta);
  m.impl("moe_gating_top_k_hash", softnpu::top_k_hash_meta);
}
TORCH_LIBRARY_IMPL(_C_ascend, PrivateUse1, m) {
  m.impl("moe_gating_top_k", softnpu::on_stream());
  m.impl("moe_gating_top_k_hash", softnpu::on_stream());
}
