-- Renews a lease with a new state and load.
-- ARGV: server id, address or '', lease, lease in ms, the caller's workload or ''.
-- Returns 1; 0 if the server is unknown; 2 if another server has its address; 3 if another workload registered it; or
-- the span to which the server must move, with 1 if it waits for no client or else 0.
local IS_READY, IS_DRAINING = '2', '3'
listening_since(tonumber(ARGV[4]))
local holder = redis.call('HGET', ADDRESSES, ARGV[2])
if holder and holder ~= ARGV[1] then return 2 end
if is_anothers(ARGV[1], ARGV[5]) then return 3 end
local before = redis.call('HGET', LEASES, ARGV[1])
if not before or redis.call('HEXISTS', SERVERS, ARGV[1]) == 0 then return 0 end
hear(ARGV[1], ARGV[3])
local was_suspected = redis.call('DEL', suspect_key(ARGV[1])) == 1
redis.call('DEL', reporter_key(ARGV[1]))  -- what one workload said before this is past
local state = string.sub(ARGV[3], 1, 1)
if was_suspected or string.sub(before, 1, 1) ~= state then
  changed(ARGV[1], state == IS_READY and READY or STATE)
end
local order = redis.call('HMGET', ORDER, 'server', 'address', 'span', 'version', 'change', 'at_once')
if order[1] == ARGV[1] and state ~= IS_DRAINING then
  -- A server that has not begun to move need not move if others have left or joined: the move might uncover blocks.
  if only_changes_since(order[5] or '0-0', order[4], {[READY] = true}) then return {order[3], order[6] or '0'} end
  redis.call('DEL', ORDER)
elseif order[1] and order[1] ~= ARGV[1] and order[2] == ARGV[2] and state == IS_READY then
  redis.call('DEL', ORDER)  -- the server has moved, and is registered under its new id
end
return 1
