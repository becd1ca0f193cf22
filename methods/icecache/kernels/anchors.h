// Parents as the authors' code finds them in long prompts: most points choose among those of anchors near them.
#pragma once

#include "levels.h"

// nodes above which points are searched for only after all others, too late for those to count them
constexpr int64_t BATCHED = 1000;

// delta(x, y) = c^2 - x . y - sqrt((c^2 - |x|^2) (c^2 - |y|^2)) of a point and its parent.
inline float distance(const Tree& tree, int32_t row, int32_t node) {
    return tree.largest[0] - tree.point[row].affinity - tree.height(row) * tree.height_of_node(node);
}

// The parents of `reach` anchors up to `anchor`, and of as many after it, each once. listed: of each node the last
// anchor that it was listed for.
inline std::vector<int32_t> parents_near(int64_t anchor, int64_t reach, const std::vector<int32_t>& parents,
                                         std::vector<int64_t>& listed) {
    std::vector<int32_t> nodes;
    for (int64_t step = 0; step < 2 * reach; step++) {
        int64_t other = step < reach ? anchor - step : anchor + 1 + step - reach;
        if (other < 0 || other >= int64_t(parents.size()) || listed[parents[other]] == anchor) continue;
        nodes.push_back(parents[other]);
        listed[parents[other]] = anchor;
    }
    return nodes;
}

// Parents of points among the nodes of `level`, in the order of arrival, as `nearest_nodes` writes them.
//
// Every `interval`-th point and the last are anchors, whose parents are searched. Another point takes the nearest among
// the parents of the `reach` anchors on either side of it, if no farther than `threshold` times that parent's farthest
// child so far; else its parent is searched, too.
inline void anchored_nodes(const Tree& tree, Array<const int32_t, 1> rows, int64_t level, int64_t interval,
                           int64_t reach, double threshold, int64_t fov, int64_t exhaustive_below, const Workspace& work,
                           Array<int32_t, 1> parents) {
    bool late = tree.level_size[level] > BATCHED;
    int64_t count = 1 + (rows.size() - 1 + interval - 1) / interval;
    std::vector<int64_t> positions(count), listed(tree.nodes(), ABSENT);
    std::vector<int32_t> anchors(count), anchor_parents(count);
    for (int64_t anchor = 0; anchor < count; anchor++) {
        positions[anchor] = std::min(anchor * interval, rows.size() - 1);
        anchors[anchor] = rows[positions[anchor]];
    }
    nearest_nodes(tree, anchors.data(), count, level, fov, exhaustive_below, work, anchor_parents.data());
    std::vector<float> farthest(tree.nodes()), products_of(2 * reach + 3);
    for (int64_t anchor = 0; anchor < count; anchor++) {
        int32_t parent = anchor_parents[anchor];
        parents[positions[anchor]] = parent;
        farthest[parent] = std::max(farthest[parent], distance(tree, anchors[anchor], parent));
    }
    for (int64_t anchor = 0; anchor < count - 1; anchor++) {
        std::vector<int32_t> nodes = parents_near(anchor, reach, anchor_parents, listed);
        int64_t near = nodes.size(), nearest = 0;
        nodes.resize(near + 3);
        for (int64_t i = positions[anchor] + 1; i < positions[anchor + 1]; i++) {
            int32_t row = rows[i];
            products(tree.node_key, {nodes.data(), near, 1}, near, tree.key(row).data(),
                     {products_of.data(), 1, int64_t(products_of.size())});
            float smallest = INFINITY;
            for (int64_t k = 0; k < near; k++) {
                tree.point[row].affinity = products_of[k];
                float far = distance(tree, row, nodes[k]);
                if (far < smallest) smallest = far, nearest = k;
            }
            tree.point[row].affinity = products_of[nearest], parents[i] = nodes[nearest];
            if (float(threshold) * farthest[parents[i]] < smallest) {
                nearest_nodes(tree, &row, 1, level, fov, exhaustive_below, work, &parents[i]);
                smallest = late ? 0 : distance(tree, row, parents[i]);
            }
            farthest[parents[i]] = std::max(farthest[parents[i]], smallest);
        }
    }
}
