// P-DCI (Li & Malik 2017, algorithm 2) down a DCI tree, as the authors' code does it: each query of a group alone.
//
// A beam goes from the root to level 1. Of a node, the children nearest to the query in projection are visited, in
// batches, and no more of them than are wanted come away: on the way the beam's width, at level 1 as many as pages.
#pragma once

#include "ranking.h"

constexpr int64_t BATCH = 128;  // entries of a sorted projection that are visited before any test whether to stop

// composites, simple indices of each, and the share of a node's children that is enough.
struct PDCI {
    int64_t composites, simple;
    double share;
};

// Entries of a sorted projection between which it was visited.
struct Visited {
    int64_t low, high;
};

// A simple index: children by their projections on a direction, ascending.
struct SimpleIndex {
    std::vector<float> values;
    std::vector<int32_t> order;
    float target;            // the query's projection
    Visited visited, after;  // now, and once the next batch is
    float gap;               // how far from the target the last of that batch is: infinitely, if none is left

    // Of a node's children work.rows[:count] and direction j.
    SimpleIndex(const Tree& tree, int64_t j, int64_t count, float target, const Workspace& work)
        : values(count), order(count), target(target) {
        std::iota(order.begin(), order.end(), 0);
        for (int64_t i = 0; i < count; i++)
            values[i] = tree.projection[work.rows[i]][j] + tree.height(work.rows[i]) * tree.upright(j);
        sort(values.data(), order.data(), count);
        int64_t high = 0;
        while (high < count && values[high] < target) high++;
        after = {high - 1, high};
        look_ahead();
    }

    // The next batch has been visited; the one after it: from the side nearer to the target, then the other.
    void look_ahead() {
        visited = after;
        int64_t count = values.size(), room = BATCH;
        bool upwards = after.low < 0 ||
                       (after.high < count && values[after.high] - target < target - values[after.low]);
        gap = INFINITY;
        for (int side = 0; side < 2; side++, upwards = !upwards) {
            int64_t taken = std::min(room, upwards ? count - after.high : after.low + 1);
            if (taken && upwards)
                gap = std::fabs(values[(after.high += taken) - 1] - target);
            else if (taken)
                gap = std::fabs(values[(after.low -= taken) + 1] - target);
            room -= taken;
        }
    }
};

// [J] <q, u_j> / |q|; the published code does not scale it by c, as it does keys.
inline std::vector<float> projected(const Tree& tree, const float* query, int64_t directions) {
    std::vector<float> target(directions);
    float squared = dot(query, query, tree.width());
    for (int64_t j = 0; j < directions && squared; j++)
        target[j] = dot(tree.direction[j], query, tree.width()) / std::sqrt(squared);
    return target;
}

// Keep, of a node's children work.rows[:count], the candidates: those met in all simple indices of a composite; how
// many.
//
// In turn, each composite's simple index whose batch ends nearest to the query visits it, until there are `least`
// candidates, and `share` of the children or as many visits as a composite has entries.
inline int64_t visit(const Tree& tree, int64_t count, const std::vector<float>& target, const PDCI& how, int64_t least,
                     const Workspace& work) {
    if (count <= BATCH) return count;
    std::vector<SimpleIndex> indices;
    for (size_t j = 0; j < target.size(); j++) indices.emplace_back(tree, j, count, target[j], work);
    float enough = std::ceil(float(how.share) * float(count));
    std::vector<int32_t> met(how.composites * count);
    std::vector<bool> is_candidate(count);
    int64_t visits = 0, candidates = 0;
    while (candidates < least || (candidates < enough && visits < how.simple * count))
        for (int64_t composite = 0; composite < how.composites; composite++) {
            auto first = indices.begin() + composite * how.simple;
            SimpleIndex& index = *std::min_element(
                first, first + how.simple,
                [](const SimpleIndex& a, const SimpleIndex& b) { return a.gap < b.gap; });
            for (int64_t at = index.after.low + 1; at < index.after.high; at++) {
                if (index.visited.low < at && at < index.visited.high) continue;
                int32_t child = index.order[at];
                visits++;
                if (++met[composite * count + child] == how.simple && !is_candidate[child]) {
                    is_candidate[child] = true;
                    candidates++;
                }
            }
            index.look_ahead();
        }
    int64_t filled = 0;
    for (int64_t i = 0; i < count; i++) {
        work.rows[filled] = work.rows[i];
        filled += is_candidate[i];
    }
    return filled;
}

// How many points were offered, in work.members, and how many keys scored.
struct Descent {
    int64_t offered, visited;
};

// Offer the beam of each upper level, and of level 1 the best `width` children of every node in the beam above. scores
// [points], of those offered.
inline Descent descend(const Tree& tree, const float* query, int64_t fov, int64_t width, const PDCI& how, float* scores,
                       const Workspace& work) {
    std::vector<float> target = projected(tree, query, how.composites * how.simple);
    Descent descent{0, 0};
    int64_t& offered = descent.offered;
    work.nodes[0] = ROOT;
    int64_t beam = 1;
    for (int64_t level = tree.state[TOP]; level > 0; level--) {
        int64_t most = level == 1 ? width : fov, first = offered;
        for (int64_t at = 0; at < beam; at++) {
            int64_t count = children_of(tree, work.nodes[at], 0, work);
            if (count > most) count = visit(tree, count, target, how, most, work);
            products(tree, work.rows, count, query, work.exact);
            descent.visited += count;
            int64_t chosen = best(work.exact[0], count, most, work.picked.data);
            for (int64_t i = 0; i < chosen; i++, offered++) {
                work.members[offered] = work.rows[work.picked[i]];
                scores[offered] = work.exact[0][work.picked[i]];
            }
        }
        if (level == 1) break;
        beam = best(scores + first, offered - first, fov, work.picked.data);
        for (int64_t at = 0; at < beam; at++) {
            int64_t chosen = first + work.picked[at];
            work.members[first + at] = work.members[chosen], scores[first + at] = scores[chosen];
            work.nodes[at] = tree.point[work.members[first + at]].node;
        }
        offered = first + beam;
    }
    return descent;
}

// As `best_pages`, of the points that each query's own descent offers; how many keys were scored for all.
inline int64_t p_dci_pages(const Tree& tree, const Matrix<float>& queries, int64_t fov, const PDCI& how,
                           const Matrix<int32_t>& pages, const Matrix<float>& scores, const Workspace& work) {
    int64_t visited = 0;
    for (int64_t g = 0; g < queries.rows; g++) {
        Descent descent = descend(tree, queries[g], fov, pages.width, how, work.score[g], work);
        visited += descent.visited;
        std::fill_n(work.scratch.data, tree.state[PAGES], -INFINITY);
        for (int64_t i = 0; i < descent.offered; i++) {
            float& score = work.scratch[tree.point[work.members[i]].page];
            score = std::max(score, work.score[g][i]);
        }
        write_best(work.scratch.data, tree.state[PAGES], pages.width, pages[g], scores[g]);
    }
    return visited;
}

// As `best_rows`, of the points that each query's own descent offers; how many keys were scored for all.
inline int64_t p_dci_rows(const Tree& tree, const Matrix<float>& queries, int64_t fov, const PDCI& how,
                          const Matrix<int32_t>& rows, const Matrix<float>& scores, const Workspace& work) {
    int64_t visited = 0;
    for (int64_t g = 0; g < queries.rows; g++) {
        Descent descent = descend(tree, queries[g], fov, rows.width, how, work.score[g], work);
        visited += descent.visited;
        write_best(work.score[g], descent.offered, rows.width, rows[g], scores[g]);
        for (int32_t* row = rows[g]; row < rows[g] + rows.width; row++)
            if (*row != ABSENT) *row = work.members[*row];
    }
    return visited;
}
