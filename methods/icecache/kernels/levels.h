// Levels: which points become nodes, whose children points are, and what changes with a new node.
#pragma once

#include "pages.h"

constexpr float CLOSE = 1e-4f;  // of c^2: more than a product loses in rounding
constexpr int64_t PARENTS_AT_ONCE = 8;  // points whose parents are searched together: a node's key is read once for all

// The levels of arriving points; level_size counts them.
//
// draws [n], uniform numbers in [0, 1): a point climbs while they say so; or [0]: it climbs where the next level has
// room, so that its size stays the promoted share of the size below. first, above: promoted shares of level 1 and of the
// levels above. A point rises at most one level above all before it, so that no level is empty.
inline void assign_levels(Array<int64_t, 1> level_size, int64_t top, Array<const double, 1> draws, double first,
                          double above, Array<int32_t, 1> levels) {
    for (int64_t i = 0; i < levels.size(); i++) {
        int64_t level = 1;
        double share = first, draw = draws.size() ? draws[i] : 0;
        for (; level <= top && level < level_size.size() - 2; level++, share = above) {
            if (draws.size()) {
                if (draw >= share) break;
                draw /= share;
            } else if (share * (level_size[level] + 1) < level_size[level + 1] + 1) {
                break;
            }
        }
        top = std::max(top, level);
        levels[i] = level;
        level_size[level]++;
    }
}

// The levels of arriving points as the authors' code counts them; level_size counts them. Returns the level of the next
// arrival, as `level` is of the first.
//
// A point goes to level 1, but the one after a point that leaves the level above its own with less than the promoted
// share of it goes there. So shares are rounded up, and a promotion is an arrival late.
inline int64_t assign_levels_in_turn(Array<int64_t, 1> level_size, int64_t top, int64_t level, double first,
                                     double above, Array<int32_t, 1> levels) {
    for (int32_t& of_point : levels) {
        float share = level == 1 ? first : above;
        top = std::max(top, level), of_point = level;
        level_size[level]++;
        bool is_short = level == top ? level_size[level] == std::ceil(1 / share)
                                     : float(level_size[level]) >= float(level_size[level + 1]) / share;
        level = is_short && level < level_size.size() - 2 ? level + 1 : 1;
    }
    return level;
}

// Parents of points among the nodes of `level`: the largest <T_K(x), T_K(y)>, of equal ones the first.
//
// Writes the parents and every point's affinity x . y, from which any later c can be served.
inline void nearest_nodes(const Tree& tree, const int32_t* rows, int64_t count, int64_t level, int64_t fov,
                          int64_t exhaustive_below, const Workspace& work, int32_t* parents) {
    std::vector<float> queries(PARENTS_AT_ONCE * tree.width());
    float heights[PARENTS_AT_ONCE];
    for (int64_t start = 0; start < count; start += PARENTS_AT_ONCE) {
        int64_t size = std::min(PARENTS_AT_ONCE, count - start);
        for (int64_t g = 0; g < size; g++) {
            heights[g] = tree.height(rows[start + g]);
            tree.read_key(rows[start + g], &queries[g * tree.width()]);
        }
        Matrix<float> asked{queries.data(), size, tree.width()};
        Ranked ranked = rank_nodes(tree, asked, heights, level, false, fov, exhaustive_below, false, work);
        // where the best nodes above are new and have no children: all of the level
        if (ranked.first == ranked.count)
            ranked = rank_nodes(tree, asked, heights, level, false, fov, tree.nodes(), false, work);
        for (int64_t g = 0; g < size; g++) {
            const float* score = work.node_score[g];
            const float* highest = std::max_element(score + ranked.first, score + ranked.count);
            int32_t parent = work.nodes[highest - score];
            parents[start + g] = parent;
            tree.point[rows[start + g]].affinity = *highest - heights[g] * tree.height_of_node(parent);
        }
    }
}

// New nodes, without children, for promoted points.
inline void add_nodes(const Tree& tree, Array<const int32_t, 1> rows, int64_t level) {
    for (int32_t row : rows) {
        int32_t node = tree.state[NODES]++;
        tree.point[row].node = node;
        tree.node[node] = {row, int32_t(level), ABSENT, 0};
        tree.read_key(row, tree.node_key[node]);
        std::fill_n(tree.node_sum[node], tree.width(), 0.0f);
    }
}

// Give a node above the old top level all old top points as children, in the pages they are in.
inline void take_over_root(const Tree& tree, int32_t node, const Workspace& work) {
    tree.node[node].first = std::exchange(tree.node[ROOT].first, ABSENT);
    tree.node[node].children = std::exchange(tree.node[ROOT].children, 0);
    std::copy_n(tree.node_sum[ROOT], tree.width(), tree.node_sum[node]);
    std::fill_n(tree.node_sum[ROOT], tree.width(), 0.0f);
    for (int32_t page = tree.node[node].first; page != ABSENT; page = tree.page[page].next) tree.page[page].node = node;
    int64_t count = children_of(tree, node, 0, work);
    affinities(tree, tree.node[node].point, work.rows, count, work);
    for (int64_t i = 0; i < count; i++) tree.point[work.rows[i]].affinity = work.scratch[i];
}

// work.rows: the children of marked nodes that may be nearer to a newcomer than to their parents; how many. `ranked`
// nodes are in work.nodes, and their products with the newcomer in work.node_score[0].
//
// A child is not, by the triangle inequality, if its distance to its parent is at most half of the newcomer's to that
// parent; |T_K(x) - T_K(y)|^2 = 2 c^2 - 2 <T_K(x), T_K(y)>.
inline int64_t undecided(const Tree& tree, int64_t ranked, const Workspace& work) {
    float squared_c = tree.largest[0];
    std::vector<float> decided(tree.nodes());  // a child's product with its parent from which it stays
    for (int64_t i = 0; i < ranked; i++)
        decided[work.nodes[i]] = squared_c - (squared_c - work.node_score[0][i]) / 4 + CLOSE * squared_c;
    int64_t count = 0;
    for (int32_t node = 0; node < tree.nodes(); node++) {
        if (!work.marked[node]) continue;
        float height = tree.height_of_node(node);
        for (int64_t at = count, stop = children_of(tree, node, count, work); at < stop; at++) {
            int32_t row = work.rows[at];
            work.rows[count] = row;
            count += tree.point[row].affinity + tree.height(row) * height < decided[node];
        }
    }
    return count;
}

// Take the points below a new node's level that are nearer to it than to their parents from those parents; how many, in
// work.rows.
//
// Only the children of the nodes that a parent search would reach are asked, and of these the undecided.
inline int64_t leave_for(const Tree& tree, int32_t node, int64_t fov, int64_t exhaustive_below, const Workspace& work) {
    int32_t point = tree.node[node].point, level = tree.node[node].level;
    float height = tree.height(point);
    Matrix<float> query{tree.node_key[node], 1, tree.width()};
    int64_t ranked = rank_nodes(tree, query, &height, level, false, fov, exhaustive_below, false, work).count;
    bool wide = tree.level_size[level] <= exhaustive_below;
    mark_front(tree, ranked, 1, level, wide ? ranked : fov, work);
    int64_t count = undecided(tree, ranked, work), leaving = 0;
    affinities(tree, point, work.rows, count, work);
    for (int64_t i = 0; i < count; i++) {
        int32_t row = work.rows[i];
        int32_t parent = tree.node[tree.page[tree.point[row].page].node].point;
        if (work.score[0][i] > tree.point[row].affinity + tree.height(row) * tree.height(parent)) {
            tree.point[row].affinity = work.scratch[i];
            work.rows[leaving++] = row;
        }
    }
    for (int64_t i = 0; i < leaving; i++) remove_child(tree, work.rows[i]);
    return leaving;
}
