// A search: rank nodes from the top level down, and list the children of the best, page by page.
#pragma once

#include "tree.h"

constexpr int64_t EVERY_LEVEL = 0;
constexpr int64_t PAGES_AHEAD = 8;  // a node's pages mostly follow one another

// Score work.nodes[start:stop] by own key or by the mean of the children; a childless node has no mean. heights: the
// queries' last coordinates, for a parent search (by T_K), or null.
inline void score_nodes(const Tree& tree, const Matrix<float>& queries, const float* heights, bool by_centroid,
                        int64_t start, int64_t stop, const Workspace& work) {
    products(by_centroid ? tree.node_sum : tree.node_key, work.nodes, start, stop, queries, work.node_score);
    if (!by_centroid && !heights) return;
    for (int64_t i = start; i < stop; i++) {
        const Node& node = tree.node[work.nodes[i]];
        if (by_centroid)
            work.scratch[i] = node.children ? 1.0f / node.children : 0.0f;
        else
            work.scratch[i] = tree.height(node.point);
    }
    for (int64_t g = 0; g < queries.rows; g++) {
        float* score = work.node_score[g];
        for (int64_t i = start; i < stop; i++)
            score[i] = by_centroid ? score[i] * work.scratch[i] : score[i] + heights[g] * work.scratch[i];
    }
}

// Mark, for each query, the best `fov` of the nodes of `level` that were scored and have children.
inline void mark_front(const Tree& tree, int64_t count, int64_t group, int64_t level, int64_t fov, const Workspace& work) {
    std::fill_n(work.marked.data, tree.nodes(), 0);
    std::vector<float> barred(count);
    for (int64_t i = 0; i < count; i++) {
        const Node& node = tree.node[work.nodes[i]];
        if (node.children == 0 || (level != EVERY_LEVEL && node.level != level)) barred[i] = -INFINITY;
    }
    for (int64_t g = 0; g < group; g++) {
        const float* score = work.node_score[g];
        for (int64_t i = 0; i < count; i++) work.scratch[i] = score[i] + barred[i];
        int64_t chosen = best(work.scratch.data, count, fov, work.picked.data);
        for (int64_t i = 0; i < chosen; i++) work.marked[work.nodes[work.picked[i]]] = 1;
    }
}

// Write a page's members to work.rows from `count` on, all slots at once; the new count.
inline int64_t members(const Tree& tree, int32_t page, int64_t count, const Workspace& work) {
    fetch(reinterpret_cast<const char*>(tree.slots[page + PAGES_AHEAD]));
    std::copy_n(tree.slots[page], tree.slots.width, &work.rows[count]);
    return count + tree.page[page].count;
}

// Write a node's children, page by page, to work.rows from `count` on; the new count.
inline int64_t children_of(const Tree& tree, int32_t node, int64_t count, const Workspace& work) {
    for (int32_t page = tree.node[node].first; page != ABSENT; page = tree.page[page].next)
        count = members(tree, page, count, work);
    return count;
}

// work.nodes[first:count] are of the lowest level that was ranked, and no others.
struct Ranked {
    int64_t first, count;
};

// Score nodes of level `lowest` and more: all of them from the top down to the first level that has more than
// `exhaustive_below`, and below that the children of the best `fov` nodes of the level above. heights: as of
// `score_nodes`; upper: levels above `lowest` are wanted for themselves, not only as a way down: then work.nodes[:first]
// are their nodes, and work.opened marks the nodes whose children all these are.
inline Ranked rank_nodes(const Tree& tree, const Matrix<float>& queries, const float* heights, int64_t lowest,
                         bool upper, int64_t fov, int64_t exhaustive_below, bool by_centroid, const Workspace& work) {
    int64_t top = tree.state[TOP], level = top + 1;
    while (level > lowest && tree.level_size[level - 1] <= exhaustive_below) level--;
    Ranked ranked{0, 0};
    for (int32_t node = 0; node < tree.nodes(); node++) {
        int32_t of_node = tree.node[node].level;
        work.opened[node] = of_node > level;
        if (node != ROOT && (of_node == level || (upper && of_node > level))) work.nodes[ranked.count++] = node;
    }
    score_nodes(tree, queries, heights, by_centroid, 0, ranked.count, work);
    while (level > lowest) {
        if (level > top) {
            std::fill_n(work.marked.data, tree.nodes(), 0);
            work.marked[ROOT] = 1;
        } else {
            mark_front(tree, ranked.count, queries.rows, level, fov, work);
        }
        int64_t children = 0;
        for (int32_t node = 0; node < tree.nodes(); node++) {
            work.opened[node] |= work.marked[node];
            if (work.marked[node]) children = children_of(tree, node, children, work);
        }
        level--;
        ranked.first = ranked.count;
        for (int64_t i = 0; i < children; i++) work.nodes[ranked.count++] = tree.point[work.rows[i]].node;
        score_nodes(tree, queries, heights, by_centroid, ranked.first, ranked.count, work);
    }
    return ranked;
}

// List a node's pages, and their members, after the first `runs`; the new count of pages.
inline int64_t list_pages(const Tree& tree, int32_t node, int64_t runs, const Workspace& work) {
    for (int32_t page = tree.node[node].first; page != ABSENT; page = tree.page[page].next, runs++) {
        work.pages[runs] = page;
        work.starts[runs + 1] = members(tree, page, work.starts[runs], work);
    }
    return runs;
}

// Nodes that were scored, and pages listed, in work.pages, work.starts and work.rows.
struct Listing {
    int64_t ranked, runs;
};

// Score nodes, then list the children of the best of them; every child of a marked node meets all queries.
//
// By point, the nodes' own keys are results too, and the nodes of level 2 are what is chosen from. By centroid, nodes of
// all levels compete, and an upper key is a result only as somebody's child.
inline Listing search(const Tree& tree, const Matrix<float>& queries, int64_t fov, int64_t exhaustive_below,
                      bool by_centroid, const Workspace& work) {
    int64_t ranked = rank_nodes(tree, queries, nullptr, 2, true, fov, exhaustive_below, by_centroid, work).count;
    mark_front(tree, ranked, queries.rows, by_centroid ? EVERY_LEVEL : 2, fov, work);
    if (by_centroid || tree.state[TOP] < 2) work.marked[ROOT] = 1;
    int64_t runs = work.starts[0] = 0;
    for (int32_t node = 0; node < tree.nodes(); node++)
        if (work.marked[node] || (work.opened[node] && !by_centroid)) runs = list_pages(tree, node, runs, work);
    return {ranked, runs};
}

// List every page; how many.
inline int64_t scan(const Tree& tree, const Workspace& work) {
    int64_t runs = work.starts[0] = 0;
    for (int32_t node = 0; node < tree.nodes(); node++) runs = list_pages(tree, node, runs, work);
    return runs;
}
